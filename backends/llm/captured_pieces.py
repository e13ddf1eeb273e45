"""Steps of any kind in graphs: what lies between the attention of two layers is launched by one call.

Attention itself is computed as without graphs, for what it does depends on the lengths of sequences and prompts. The
graphs are padded to a few numbers of tokens; rows of padding have tokens, but attention never sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .attention.paged import PagedAttention, Rotation
from .cuda_graphs import CudaGraphs, Replay, capture_each, measure_each
from .step_context import StepContext, Taps

logger = logging.getLogger(__name__)

# A step of more tokens keeps a GPU busy for longer than it takes to launch its kernels one by one.
MOST_TOKENS = 1024
# From here on a size is at most an eighth larger than the one before.
_DENSE_SIZES = (1, 2, 4, 8, 16)
_SIZES_PER_DOUBLING = 8

Norm = tuple[torch.Tensor, float]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Attention of a layer, between two graphs: what it gets, in memory of the graph before."""

    layer: int
    heads: torch.Tensor
    rotation: Rotation | None
    norm: Norm | None


class _Stops:
    """Stands for attention while a network is captured. At each layer a graph ends, and the next one begins."""

    is_capturable = False

    def __init__(self, fuses_norm: bool, output: torch.Tensor, graphs: CudaGraphs) -> None:
        self.fuses_norm = fuses_norm
        self.found: list[tuple[Replay, _Stop]] = []
        self._output = output
        self._graphs = graphs
        self.is_recording = False

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, _inputs: Any, norm: Norm | None = None
    ) -> torch.Tensor:
        if self.is_recording:
            replay = self._graphs.end()
            # Its memory is free for the graphs behind the next one, which this layer's attention runs before.
            self.found.append((replay, _Stop(layer, self._graphs.borrowed(heads), rotation, norm)))
            self._graphs.begin()
        return self._output

    def prepare(self, _batch: Any) -> Any:
        raise AssertionError("a step is prepared before its graphs run")

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: Any) -> torch.Tensor:
        return self.rope_and_attend(layer, torch.cat((queries, kv.flatten(1, 2)), dim=1), None, inputs)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A network: graphs, each before the attention of a layer, and the last one, which makes `hidden`."""

    stops: list[tuple[Replay, _Stop]]
    last: Replay
    hidden: torch.Tensor


class CapturedPieces:
    """`width`: what attention makes of a token. Steps of more than `most_tokens` or `MOST_TOKENS` have no graphs.
    `captures_at_load`: not only when a size is needed."""

    def __init__(
        self,
        network: Any,
        attention: PagedAttention,
        *,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
        most_tokens: int,
        captures_at_load: bool = True,
        graphs: CudaGraphs,
    ) -> None:
        self._network = network
        self._attention: Any = attention
        self._fuses_norm = bool(getattr(attention, "fuses_norm", False))
        self._graphs = graphs
        self._captures_at_load = captures_at_load
        # States before these layers of each step are kept, [tokens, layers * hidden_size].
        self._tapped: frozenset[int] = frozenset()
        self._states: torch.Tensor | None = None
        self._sizes = token_sizes(min(most_tokens, MOST_TOKENS))
        most = self._sizes[-1]
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._output = torch.zeros(most, width, dtype=dtype, device=device)
        self._captured: dict[int, _Pieces] = {}
        self._has_failed = False

    def tap(self, layers: frozenset[int]) -> None:
        """Let graphs keep the states before these layers, see `states_of`."""
        self._tapped = layers
        self._captured.clear()
        if self._captures_at_load:
            self.capture_all()

    def states_of(self, count: int) -> torch.Tensor:
        """A copy of those of the last step, which had `count` tokens."""
        assert self._states is not None, "no layers are tapped"
        return self._states[:count].clone()

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, inputs: Any) -> torch.Tensor | None:
        """Hidden states [tokens, hidden_size] of a step that attention has prepared as `inputs`, valid until any graph
        runs. None if a step of as many tokens has no graphs, and none can be captured."""
        count = len(input_ids)
        if count > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= count)
        pieces = self._pieces(size)
        if pieces is None:
            return None
        self._input_ids[:count].copy_(input_ids)
        self._positions[:count].copy_(positions)
        if count < size:
            self._output[count:size].zero_()  # so that no step depends on the one before
        for replay, stop in pieces.stops:
            replay()
            self._attend(stop, inputs, count)
        pieces.last()
        return pieces.hidden[:count]

    def _attend(self, stop: _Stop, inputs: Any, count: int) -> None:
        heads, rotation, output = stop.heads[:count], stop.rotation, self._output[:count]
        if rotation is not None:
            rotation = Rotation(rotation.cosines[:count], rotation.sines[:count])
        if self._fuses_norm:
            self._attention.rope_and_attend(stop.layer, heads, rotation, inputs, stop.norm, output)
        else:
            output.copy_(self._attention.rope_and_attend(stop.layer, heads, rotation, inputs))

    def capture_all(self) -> None:
        """Capture all sizes, the largest first, whose memory the others share."""
        if not self._has_failed:
            capture_each(f"graphs of steps of up to {self._sizes[-1]} tokens", self._captures())

    def measure(self, used: Callable[[], int]) -> int:
        """The bytes that all graphs will take, see `measure_each`."""
        return measure_each(self._captures(), 1, used)

    def _captures(self) -> list[Callable[[], bool]]:
        return [partial(self._can_capture, size) for size in reversed(self._sizes)]

    def _can_capture(self, size: int) -> bool:
        return self._pieces(size) is not None

    def _pieces(self, size: int) -> _Pieces | None:
        pieces = self._captured.get(size)
        if pieces is None and not self._has_failed:
            try:
                pieces = self._captured[size] = self._capture(size)
            except RuntimeError as error:  # out of memory, or what a graph cannot hold
                self._has_failed = True
                logger.warning("steps of %d tokens with prompts are computed without CUDA graphs: %s", size, error)
        return pieces

    def _capture(self, size: int) -> _Pieces:
        graphs = self._graphs
        stops = _Stops(self._fuses_norm, self._output[:size], graphs)
        graphs.warm_up(lambda: self._keep(size, *self._compute(size, stops)))
        stops.is_recording = True
        with graphs.recording():
            hidden, found = self._compute(size, stops)
            self._keep(size, hidden, found)
            last = graphs.end()
        return _Pieces(stops.found, last, graphs.borrowed(hidden))

    def _compute(self, size: int, stops: _Stops) -> tuple[torch.Tensor, list[torch.Tensor]]:
        taps = Taps(self._tapped) if self._tapped else None
        step = StepContext(positions=self._positions[:size], attention=stops, inputs=None, taps=taps)
        hidden: torch.Tensor = self._network(self._input_ids[:size], step)
        return hidden, [] if taps is None else taps.found

    def _keep(self, size: int, hidden: torch.Tensor, found: list[torch.Tensor]) -> None:
        if found:
            states = torch.cat(found, dim=-1)
            if self._states is None:  # the warm-up
                self._states = hidden.new_zeros(self._sizes[-1], states.shape[1])
            self._states[:size].copy_(states)


def token_sizes(most: int) -> list[int]:
    """Sizes that steps are padded to."""
    sizes = list(_DENSE_SIZES)
    while sizes[-1] < most:
        step = max(16, (1 << (sizes[-1].bit_length() - 1)) // _SIZES_PER_DOUBLING)
        sizes.append(sizes[-1] + step)
    return [*(size for size in sizes if size < most), most]

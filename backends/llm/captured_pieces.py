"""Steps of any kind in graphs: what lies between the attention of two layers is launched by one call.

Attention itself is computed as without graphs, for what it does depends on the lengths of sequences and prompts. The
graphs are padded to a few numbers of tokens; rows of padding have tokens, but attention never sees them. What adapters
add is in graphs of its own, so that steps without adapters pay nothing for them.

Where ranks share a network, each has these graphs, with the sums over ranks in them. Rank 0 says which one to capture,
and the size that a step is padded to. A rank that cannot capture computes the same padded step without graphs, so all
ranks take the same sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .attention.kv_blocks import KvBlocks
from .attention.paged import IntArray, PagedAttention, Rotation
from .cuda_graphs import CudaGraphs, Replay, can_capture, capture_each, measure_each
from .lora.step import CapturedAdapters, StepAdapters, most_tiles, tile_rows, tiles_in
from .step_context import StepContext, Taps

if TYPE_CHECKING:
    from .models.load import LoadedNetwork
    from .options import EngineOptions

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
    """Stands for attention while a network is captured. At each layer a graph ends, and the next one begins. `attend`
    is called in place of that where there are no graphs."""

    def __init__(
        self, fuses_norm: bool, output: torch.Tensor, graphs: CudaGraphs, attend: Callable[[_Stop], None] | None = None
    ) -> None:
        self.fuses_norm = fuses_norm
        self.found: list[tuple[Replay, _Stop]] = []
        self._output = output
        self._graphs = graphs
        self._attend = attend
        self.is_recording = False

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, _inputs: Any, norm: Norm | None = None
    ) -> torch.Tensor:
        if self.is_recording:
            replay = self._graphs.end()
            # Its memory is free for the graphs behind the next one, which this layer's attention runs before.
            self.found.append((replay, _Stop(layer, self._graphs.borrowed(heads), rotation, norm)))
            self._graphs.begin()
        elif self._attend is not None:
            self._attend(_Stop(layer, heads, rotation, norm))
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


# Of graphs: tokens, and whether rows have adapters.
_Key = tuple[int, bool]


class CapturedPieces:
    """`width`: what attention makes of a token. Steps of more than `most_tokens` or `MOST_TOKENS` have no graphs.
    `num_adapters`: how many a step may have; 0 where none can be in graphs. `captures_at_load`: not only when a size is
    needed. `leads` has the other ranks capture, too: by `follow_capture`, before this one does."""

    def __init__(
        self,
        network: Any,
        attention: PagedAttention,
        *,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
        most_tokens: int,
        num_adapters: int = 0,
        captures_at_load: bool = True,
        graphs: CudaGraphs,
        leads: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._network = network
        self._attention: Any = attention
        self._fuses_norm = bool(getattr(attention, "fuses_norm", False))
        self._graphs = graphs
        self._captures_at_load = captures_at_load
        self._leads = leads
        # States before these layers of each step are kept, [tokens, layers * hidden_size].
        self._tapped: frozenset[int] = frozenset()
        self._states: torch.Tensor | None = None
        self._sizes = token_sizes(min(most_tokens, MOST_TOKENS))
        most = self._sizes[-1]
        self._num_adapters = num_adapters
        self._kinds = (False, True) if num_adapters else (False,)
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._output = torch.zeros(most, width, dtype=dtype, device=device)
        num_tiles = max(map(self._num_tiles, self._sizes)) if num_adapters else 0
        self._tiles = torch.full((num_tiles, 3), -1, dtype=torch.int32, device=device)
        self._captured: dict[_Key, _Pieces] = {}
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

    def size_for(self, count: int, has_adapters: bool) -> int:
        """What a step of `count` tokens is padded to; 0 if it has no graphs, and none can be captured."""
        if count > self._sizes[-1] or has_adapters not in self._kinds:
            return 0
        size = next(size for size in self._sizes if size >= count)
        return size if self._pieces((size, has_adapters)) is not None else 0

    def words_of(self, size: int, adapters: StepAdapters) -> IntArray:
        """What `run` takes of adapters, on the host."""
        return adapters.words(size, self._num_tiles(size))

    def run(
        self,
        size: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs: Any,
        tiles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] of a step that attention has prepared as `inputs`, valid until any graph
        runs. `size` is that of `size_for`, here or on rank 0; `tiles` those of adapters."""
        count = len(input_ids)
        self._input_ids[:count].copy_(input_ids)
        self._positions[:count].copy_(positions)
        if count < size:
            self._output[count:size].zero_()  # so that no step depends on the one before
        if tiles is not None:
            num_tiles = self._num_tiles(size)
            self._tiles[:num_tiles].copy_(tiles_in(tiles)[:num_tiles])
        pieces = self._captured.get((size, tiles is not None))
        if pieces is None:  # on another rank than the first
            stops = self._stops(size, lambda stop: self._attend(stop, inputs, count))
            return self._compute(size, tiles is not None, stops)[0][:count]
        for replay, stop in pieces.stops:
            replay()
            self._attend(stop, inputs, count)
        pieces.last()
        return pieces.hidden[:count]

    def follow_capture(self, size: int, has_adapters: bool) -> None:
        """As another rank: compute once what rank 0 computes before it captures, and capture it."""
        if (size, has_adapters) in self._captured or self._has_failed:
            self._compute(size, has_adapters, self._stops(size))
        else:
            self._pieces((size, has_adapters))

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
        return measure_each(self._captures(), len(self._kinds), used)

    def _captures(self) -> list[Callable[[], bool]]:
        return [
            partial(self._can_capture, (size, has_adapters))
            for size in reversed(self._sizes)
            for has_adapters in self._kinds
        ]

    def _can_capture(self, key: _Key) -> bool:
        return self._pieces(key) is not None

    def _pieces(self, key: _Key) -> _Pieces | None:
        pieces = self._captured.get(key)
        if pieces is None and not self._has_failed:
            if self._leads is not None:
                self._leads(*key)
            try:
                pieces = self._captured[key] = self._capture(*key)
            except RuntimeError as error:  # out of memory, or what a graph cannot hold
                self._has_failed = True
                logger.warning("steps of %d tokens with prompts are computed without CUDA graphs: %s", key[0], error)
        return pieces

    def _capture(self, size: int, has_adapters: bool) -> _Pieces:
        graphs = self._graphs
        stops = self._stops(size)
        graphs.warm_up(lambda: self._keep(size, *self._compute(size, has_adapters, stops)))
        stops.is_recording = True
        with graphs.recording():
            hidden, found = self._compute(size, has_adapters, stops)
            self._keep(size, hidden, found)
            last = graphs.end()
        return _Pieces(stops.found, last, graphs.borrowed(hidden))

    def _stops(self, size: int, attend: Callable[[_Stop], None] | None = None) -> _Stops:
        return _Stops(self._fuses_norm, self._output[:size], self._graphs, attend)

    def _compute(self, size: int, has_adapters: bool, stops: _Stops) -> tuple[torch.Tensor, list[torch.Tensor]]:
        taps = Taps(self._tapped) if self._tapped else None
        adapters = None
        if has_adapters:
            adapters = CapturedAdapters(self._tiles[: self._num_tiles(size)], tile_rows(size))
        step = StepContext(positions=self._positions[:size], attention=stops, inputs=None, taps=taps, adapters=adapters)
        hidden: torch.Tensor = self._network(self._input_ids[:size], step)
        return hidden, [] if taps is None else taps.found

    def _num_tiles(self, size: int) -> int:
        """An adapter's rows are those of decodes, and those of other chunks."""
        return most_tiles(size, self._num_adapters, tile_rows(size), 2)

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


def captured_pieces(
    loaded: LoadedNetwork,
    attention: PagedAttention,
    options: EngineOptions,
    blocks: KvBlocks,
    graphs: CudaGraphs,
    leads: Callable[[int, bool], None] | None = None,
) -> CapturedPieces | None:
    """The graphs of a network on its blocks; None where its steps cannot be graphs."""
    if options.enforce_eager or not loaded.is_capturable or not can_capture(loaded.device):
        return None
    group, adapted = blocks.layout.group, loaded.adapted
    return CapturedPieces(
        loaded.network,
        attention,
        device=loaded.device,
        dtype=group.heads_dtype,
        width=loaded.attention.num_heads * (group.shared_width or group.value_width),
        most_tokens=options.max_num_batched_tokens,
        num_adapters=options.num_lora_slots if adapted is not None and adapted.is_on_device else 0,
        captures_at_load=options.capture_at_load,
        graphs=graphs,
        leads=leads,
    )

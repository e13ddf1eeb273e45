"""CUDA graphs: work of a device that is recorded once and then launched by one call."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelserver.backend import capture_turn

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
DEVICE_TYPES = {"cuda"}
# Between two lines of the log, and between two drawings of a bar.
_LOG_S, _BAR_S = 10.0, 0.1
_BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` computes anew from what the static inputs hold, into `output`, which is there until any graph runs."""

    output: torch.Tensor
    replay: Replay


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


def can_capture(device: torch.device) -> bool:
    """Whether its work can be recorded as graphs."""
    return device.type in DEVICE_TYPES


class CudaGraphs:
    """Graphs that share one pool of memory: no two of them run at the same time.

    What one graph leaves in the pool's memory is there until the next one runs. So a tensor that was made while a graph
    was recorded may be read between this graph and the next one, although the memory belongs to others by then.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None
        self._graph: Any = None

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Captured:
        self.warm_up(compute)
        with self.recording():
            output = compute()
            replay = self.end()
        return Captured(self.borrowed(output), replay)

    def warm_up(self, compute: Callable[[], object]) -> None:
        """Compute on the stream of the captures. This compiles kernels and fills caches, which a capture must not."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What this thread queues is recorded, and not computed. `end` ends a graph, `begin` begins the next.

        The first one has begun. One that was not ended is given up.
        """
        # Not the whole device: it cannot be waited for while another thread captures.
        self._stream.synchronize()
        torch.cuda.empty_cache()  # what the warm-up took belongs to this stream alone
        with capture_turn(), torch.cuda.stream(self._stream):
            self.begin()
            try:
                yield
            finally:
                if self._graph is not None:
                    with contextlib.suppress(RuntimeError):  # the one that is on its way says why
                        self.end()
                    self._graph = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for other models.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        graph, self._graph = self._graph, None
        graph.capture_end()
        self._pool = graph.pool()
        replay: Replay = graph.replay
        return replay

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which is not kept: later graphs may use it. Memory with gaps is kept."""
        if not tensor.is_contiguous():
            return tensor
        found: torch.Tensor = torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype)
        return found.view(tensor.shape)


class _Bytes:
    """The memory of a tensor, for `torch.as_tensor`, which would keep the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


class Progress:
    """How far capturing has come: a bar on a terminal, else lines of the log. `what` is captured, in the plural."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._is_bar = sys.stderr is not None and sys.stderr.isatty()
        self._began_s = self._shown_s = time.monotonic()
        if not self._is_bar:
            logger.info("capturing %d %s", total, what)

    def show(self, number: int) -> None:
        """`number` are done."""
        now_s = time.monotonic()
        if number < self._total and now_s - self._shown_s < (_BAR_S if self._is_bar else _LOG_S):
            return
        self._shown_s = now_s
        spent_s = now_s - self._began_s
        if not self._is_bar:
            logger.info("captured %d of %d %s in %.1f s", number, self._total, self._what, spent_s)
            return
        full = _BAR_WIDTH * number // self._total
        left_s = spent_s / number * (self._total - number)
        bar = "#" * full + "-" * (_BAR_WIDTH - full)
        sys.stderr.write(f"\rcapturing {self._what} [{bar}] {number}/{self._total}, {left_s:.0f} s left ")
        self.end(number == self._total)

    def end(self, is_last: bool = True) -> None:
        if self._is_bar:
            sys.stderr.write("\n" if is_last else "")
            sys.stderr.flush()


def capture_each(what: str, captures: Sequence[Callable[[], bool]]) -> None:
    """Call each until one says that it failed."""
    progress = Progress(what, len(captures))
    for number, capture in enumerate(captures, 1):
        if not capture():
            progress.end()
            return
        progress.show(number)


def measure_each(captures: Sequence[Callable[[], bool]], num_largest: int, used: Callable[[], int]) -> int:
    """The bytes that all captures will take: those of the first, whose memory the others share, and for each of the
    others what one of them adds. `used`: the bytes of the device that are in use."""
    began = used()
    if not all(capture() for capture in captures[:num_largest]):
        return 0
    largest = used() - began
    others = captures[num_largest:]
    if not others or not others[0]():
        return max(0, largest)
    return max(0, largest) + max(0, used() - began - largest) * len(others)

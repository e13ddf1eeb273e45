"""What a step is: a function `step_<name>() -> dict` in a file of this directory, whose dict goes into the report.

An assertion or any other exception is a FAIL; `Absent` says that the machine lacks what the step is about.

In a rehearsal steps run on the CPU with tiny shapes: `DEVICE` is "cpu", `sized` chooses, and `support.rehearsed_cuda`
stands for what they call of `torch.cuda`. Their figures mean nothing, and are not reported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

# Set for the processes of a rehearsal by `python -m gpu --rehearse`.
REHEARSAL = "MODELSERVER_GPU_REHEARSAL"
IS_REHEARSAL = REHEARSAL in os.environ
DEVICE = "cpu" if IS_REHEARSAL else "cuda"
_Size = TypeVar("_Size")
_Step = TypeVar("_Step", bound=Callable[[], dict[str, Any]])
_tell: Callable[[object], None] | None = None


def takes(_seconds: float, *, worth: float) -> Callable[[_Step], _Step]:
    """How long a step takes on an H100 by estimate, before it has run on one, and how much is learnt of it beside
    others. The driver reads both from the text of the file: literal numbers."""
    del worth
    return lambda step: step


def so_far(facts: object) -> None:
    """What a step has found so far, in case that it does not come to its end."""
    if _tell is not None:
        _tell(facts)


def tell_with(tell: Callable[[object], None]) -> None:
    """Where `so_far` goes: set by the process that runs steps."""
    global _tell
    _tell = tell


class Absent(Exception):  # it is no error
    """What the step needs is not here."""


def sized(real: _Size, tiny: _Size) -> _Size:
    """`tiny` in a rehearsal."""
    return tiny if IS_REHEARSAL else real


@contextmanager
def graphs_in_rehearsal() -> Iterator[None]:
    """In a rehearsal, graphs of the language-model engine are recorded and replayed on the CPU: what no capture may do
    fails there as well, and so does it if nothing is replayed."""
    if not IS_REHEARSAL:
        yield
        return
    from support.recorded_graphs import recorded_graphs

    with recorded_graphs() as device:
        yield
    assert device.num_replays, "no graph was captured and replayed"


def require(*modules: str) -> None:
    """Raise Absent unless these can be imported."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Absent(f"not installed: {', '.join(missing)}")


def require_device() -> None:
    """Raise Absent unless there is a driver with a GPU, and PyTorch can use it. A rehearsal needs neither."""
    if not IS_REHEARSAL:
        require_gpu()


def require_gpu() -> None:
    """The same for a step that cannot be rehearsed."""
    if IS_REHEARSAL:
        raise Absent("it is not rehearsed: only a GPU does what it is about")
    from modelserver_backends.tensorrt.driver import find_problem

    problem = find_problem()
    if problem:
        raise Absent(problem)
    require("torch")
    import torch

    if not torch.cuda.is_available():
        raise Absent(f"PyTorch {torch.__version__} cannot use the GPU")

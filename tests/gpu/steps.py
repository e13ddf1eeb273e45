"""What a step is: a function `step_<name>() -> dict` in a file of this directory, whose dict goes into the report.

An assertion or any other exception is a FAIL; `Absent` says that the machine lacks what the step is about.

In a rehearsal steps run on the CPU with tiny shapes: `DEVICE` is "cpu", `sized` chooses, and `support.rehearsed_cuda`
stands for what they call of `torch.cuda`. Their figures mean nothing, and are not reported.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TypeVar

# Set for the processes of a rehearsal by `python -m gpu --rehearse`.
REHEARSAL = "MODELSERVER_GPU_REHEARSAL"
IS_REHEARSAL = REHEARSAL in os.environ
DEVICE = "cpu" if IS_REHEARSAL else "cuda"
_Size = TypeVar("_Size")


class Absent(Exception):  # it is no error
    """What the step needs is not here."""


def sized(real: _Size, tiny: _Size) -> _Size:
    """`tiny` in a rehearsal."""
    return tiny if IS_REHEARSAL else real


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

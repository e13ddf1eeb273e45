"""What a step is: a function `step_<name>() -> dict` in a file of this directory, whose dict goes into the report.

An assertion or any other exception is a FAIL; `Absent` says that the machine lacks what the step is about.
"""

from __future__ import annotations

import importlib.util


class Absent(Exception):  # it is no error
    """What the step needs is not here."""


def require(*modules: str) -> None:
    """Raise Absent unless these can be imported."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Absent(f"not installed: {', '.join(missing)}")


def require_gpu() -> None:
    """Raise Absent unless there is a driver with a GPU, and PyTorch can use it."""
    from modelserver_backends.tensorrt.driver import find_problem

    problem = find_problem()
    if problem:
        raise Absent(problem)
    require("torch")
    import torch

    if not torch.cuda.is_available():
        raise Absent(f"PyTorch {torch.__version__} cannot use the GPU")

"""The Python backend: Triton's `model.py` unmodified, each instance in a child process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import PythonBackend as BACKEND  # noqa: N814
    from .backend import backend_from as python_based

__all__ = ["BACKEND", "python_based"]


def __getattr__(name: str) -> object:
    # The child processes import this package too; they need nothing of the server's side, and start sooner.
    if name == "BACKEND":
        from .backend import PythonBackend

        return PythonBackend
    if name == "python_based":
        from .backend import backend_from

        return backend_from
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

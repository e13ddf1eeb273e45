"""The Python backend: Triton's `model.py` unmodified, each instance in a child process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import PythonBackend as BACKEND  # noqa: N814

__all__ = ["BACKEND"]


def __getattr__(name: str) -> object:
    # The child processes import this package too; they need nothing of the server's side, and start sooner.
    if name == "BACKEND":
        from .backend import PythonBackend

        return PythonBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The backend directory's entry for `backend: "gate"`."""

from support.gate import GateBackend as BACKEND

__all__ = ["BACKEND"]

"""The backend `scripted`: the class that tests import too, so that both have the same events."""

from support.scripted import BACKEND

__all__ = ["BACKEND"]

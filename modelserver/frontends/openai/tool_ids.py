"""Ids of tool calls."""

from __future__ import annotations

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits


def make_tool_id(prefix: str = "call_", length: int = 24) -> str:
    """A new id; some templates insist on its length."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))

"""What a piece of generated text adds to a chat message."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any, Protocol

_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(slots=True)
class ToolDelta:
    """More of the call number `index`. The first of a call has its id and name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""

    def document(self) -> dict[str, Any]:
        """As an item of `delta.tool_calls`."""
        if not self.id:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Delta:
    """Text for the user, text of the model's reasoning, and calls of tools; each may be empty."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolDelta] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


class ToolReader(Protocol):
    """Finds calls of tools in text that comes in pieces, however it is cut."""

    def push(self, text: str) -> Delta:
        """What is certain after this much more text."""

    def finish(self) -> Delta:
        """What is left when there is no more."""


def held_back_len(text: str, marks: tuple[str, ...]) -> int:
    """How much of the end of `text` may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) and len(mark) > length for mark in marks):
            return length
    return 0


def make_tool_id(prefix: str = "call_", length: int = 24) -> str:
    """A new id of a call; some templates insist on its length."""
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(length))

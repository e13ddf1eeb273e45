"""Server-sent events, and the text and token counts in those of language models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from modelserver.bench.work import EndpointType

DONE = b"[DONE]"
# Names that Triton's models give to their text.
_TEXT_OUTPUTS = ("text_output", "output", "text", "OUTPUT")


class EventReader:
    """Cuts a stream into the data of its events."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        buffer = (self._pending + piece).replace(b"\r\n", b"\n")
        # A line end may be cut in two.
        tail = b"\r" if buffer.endswith(b"\r") else b""
        *events, self._pending = buffer[: len(buffer) - len(tail)].split(b"\n\n")
        self._pending += tail
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """The content of one event. `has_text`: it contains output; token counts are None if it has none."""

    has_text: bool = False
    is_done: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


def read_chunk(endpoint_type: EndpointType, data: bytes) -> Chunk:
    """Parse an event's data; unreadable data gives an error."""
    if data == DONE:
        return Chunk(is_done=True)
    try:
        document = json.loads(data)
    except ValueError:
        return Chunk(error=f"an event is not JSON: {data[:80].decode(errors='replace')}")
    if not isinstance(document, dict):
        return Chunk(error=f"an event is not a JSON object: {data[:80].decode(errors='replace')}")
    if document.get("error"):
        error = document["error"]
        return Chunk(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))
    if endpoint_type is EndpointType.GENERATE:
        text = next((document[name] for name in _TEXT_OUTPUTS if name in document), "")
        return Chunk(has_text=bool(text))
    usage = document.get("usage") or {}
    return Chunk(
        has_text=any(_has_text(choice) for choice in document.get("choices") or ()),
        input_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
    )


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("message") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or delta.get("tool_calls")
    )

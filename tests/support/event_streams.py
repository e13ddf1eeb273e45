"""Server-sent events of an answer."""

from __future__ import annotations

import json
from typing import Any


def events_of(text: str) -> list[dict[str, Any]]:
    """The documents of a stream, without its end mark."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]

"""What every answer and every chunk of a call has around its choices."""

from __future__ import annotations

import hashlib
from typing import Any


class Frame:
    """The id, kind, time and model of an answer."""

    def __init__(self, answer_id: str, kind: str, created_s: int, model: str) -> None:
        """`kind` is the `object` of the answer."""
        self._fields = {
            "id": answer_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint(model),
        }

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """The answer, or a chunk of it in a stream that has usage, null in most of them."""
        return {**self._fields, "choices": choices, "usage": usage}

    def around_part(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream without usage."""
        return {**self._fields, "choices": [choice]}


def fingerprint(model: str) -> str:
    """Names what answers: equal for equal models, as clients compare it between calls with a seed."""
    return "fp_" + hashlib.blake2s(model.encode(), digest_size=5).hexdigest()

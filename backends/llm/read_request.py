"""A request whose text has become tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelserver.backend import InferResponse

from .call import Call


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """As a model takes it on, or with its answer, where reading is all that was asked for.

    `text` is what `token_ids` were made of; None where tokens were given, and where nobody asks for it.
    """

    call: Call
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    response: InferResponse | None = None

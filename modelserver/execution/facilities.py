"""What all models of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from modelserver.cache.store import AnswerStore


@dataclass(frozen=True, slots=True)
class Facilities:
    """`answers` is where response caches keep answers; without it no model has a cache."""

    answers: AnswerStore | None = None

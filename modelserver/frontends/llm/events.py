"""What a generation says as it goes on: text, reasoning, calls of tools, tokens, and its end.

APIs write these in their own documents. Events of one choice come in their order; those of several choices mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Of one token: `{"token_id", "token", "bytes", "logprob", "rank", "top": [{"token_id", "token", "bytes", "logprob"}]}`.
TokenLogprob = dict[str, Any]

# Stands for minus infinity, which JSON cannot express.
LOWEST_LOGPROB = -9999.0


def json_logprob(entry: TokenLogprob) -> float | None:
    """The log-probability in `entry` as JSON can express it; None if the model gives none."""
    value: float | None = entry["logprob"]
    return None if value is None else max(value, LOWEST_LOGPROB)


class Text(NamedTuple):
    """More text for the user."""

    text: str


class Reasoning(NamedTuple):
    """More of the model's reasoning."""

    text: str


@dataclass(slots=True)
class ToolDelta:
    """More of the call number `index`. The first of a call has its id and name, the following ones its arguments."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """The arguments of a call are complete."""

    index: int


class Tokens(NamedTuple):
    """The tokens of what was said since the last time, where the call asked for them.

    Those of marks, such as tags, are among them. A model that does not tell one of both gives an empty list.
    """

    ids: list[int]
    logprobs: list[TokenLogprob]


class Finish(NamedTuple):
    """The choice has ended: `reason` is the model's, "stop" or "length" as a rule, and `stop_reason` what stopped it.

    `has_calls`: tools are to be called, and the model waits for what they say.
    """

    reason: str
    stop_reason: str | int | None
    has_calls: bool


Event = Text | Reasoning | ToolDelta | ToolEnd | Tokens | Finish
SaidEvent = Text | Reasoning | ToolDelta


def plain_token(events: Sequence[Event]) -> tuple[str, int] | None:
    """The text and the id of the token that the events say, if they say one, without a log-probability: the usual case
    of a call that asks for tokens."""
    if len(events) != 2:
        return None
    text, tokens = events
    if type(text) is not Text or type(tokens) is not Tokens or len(tokens.ids) != 1 or tokens.logprobs:
        return None
    return text.text, tokens.ids[0]


@dataclass(slots=True)
class Delta:
    """What a reader of tags or calls finds in a piece of text, in its order."""

    events: list[SaidEvent] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The text for the user."""
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))

    @property
    def calls(self) -> list[ToolDelta]:
        return [event for event in self.events if isinstance(event, ToolDelta)]

    @property
    def is_empty(self) -> bool:
        return not self.events

    def say(self, text: str) -> None:
        """Add text for the user; an empty one says nothing."""
        if text:
            self.events.append(Text(text))

    def reason(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self.events.append(Reasoning(text))

    def call(self, delta: ToolDelta) -> None:
        self.events.append(delta)

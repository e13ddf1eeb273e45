"""Tells a model's reasoning from its answer by the tags that it writes around it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.frontends.llm.events import Delta
from modelserver.frontends.llm.tools import held_back_len


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags. `is_implicit`: the template has written the first one, so that the text begins within.

    `has_special_tokens`: the tags are tokens that are left out of the text unless it is asked for. `has_channels`: the
    text is harmony, which `HarmonyReader` reads.
    """

    start: str
    end: str
    is_implicit: bool = False
    has_special_tokens: bool = False
    has_channels: bool = False


_THINK = ReasoningFormat("<think>", "</think>")
_IMPLICIT_THINK = ReasoningFormat("<think>", "</think>", is_implicit=True)

HARMONY = "openai_gptoss"
# By the name in the model's parameter `reasoning_parser`; the names are vLLM's.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _IMPLICIT_THINK,
    "deepseek_v3": _THINK,
    "ernie45": _IMPLICIT_THINK,
    "glm45": _THINK,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "minimax_m2": _IMPLICIT_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", has_special_tokens=True),
    "olmo3": _IMPLICIT_THINK,
    HARMONY: ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", has_special_tokens=True, has_channels=True),
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "step3": _IMPLICIT_THINK,
}


class _Place(enum.Enum):
    BEFORE = enum.auto()  # nothing is known yet: the first tag may come
    INSIDE = enum.auto()
    AFTER = enum.auto()  # the last tag was there, what parts it from the answer may follow
    ANSWER = enum.auto()


class ReasoningReader:
    """Splits text that comes in pieces, however it is cut. White space around the reasoning is dropped."""

    def __init__(self, tags: ReasoningFormat, *, is_inside: bool) -> None:
        """`is_inside`: the text begins with reasoning, whether a tag says so or not."""
        self._tags = tags
        self._place = _Place.BEFORE
        self._is_inside = is_inside
        self._held = ""
        self._is_begun = False

    def count(self, token_ids: Sequence[int], start: Sequence[int], end: Sequence[int]) -> int | None:
        """How many of all the text's tokens were reasoning, by those of the tags, which do not count.

        None if the tags' tokens are not among them as they are: a tokenizer may join them with their neighbours.
        """
        if self._place is _Place.ANSWER and not self._is_begun and not self._is_inside:
            return 0
        first = find_tokens(token_ids, start)
        begin = 0 if first is None else first + len(start)
        if first is None and not self._is_inside:
            return None
        last = find_tokens(token_ids, end, begin)
        if last is not None:
            return last - begin
        return len(token_ids) - begin if self._place is _Place.INSIDE else None

    def push(self, text: str) -> Delta:
        """What is certain after this much more text."""
        delta = Delta()
        if self._place is _Place.ANSWER:
            delta.say(text)
            return delta
        self._held += text
        if self._place is _Place.BEFORE:
            self._look_for_start()
        if self._place is _Place.INSIDE:
            delta.reason(self._take_reasoning())
        if self._place is _Place.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            delta.say(self._held)
            self._held = ""
        return delta

    def finish(self) -> Delta:
        """What is left when there is no more: reasoning that never ended stays reasoning."""
        held, self._held = self._held, ""
        delta = Delta()
        if self._place is _Place.INSIDE or (self._place is _Place.BEFORE and self._is_inside):
            delta.reason(held.rstrip())
        elif self._place is not _Place.AFTER:
            delta.say(held)
        return delta

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        start = self._tags.start
        if text.startswith(start):
            self._held, self._place = text[len(start) :], _Place.INSIDE
        elif not start.startswith(text):
            self._place = _Place.INSIDE if self._is_inside else _Place.ANSWER

    def _take_reasoning(self) -> str:
        if not self._is_begun:
            self._held = self._held.lstrip()
            self._is_begun = bool(self._held)
        before, end, after = self._held.partition(self._tags.end)
        if end:
            self._held, self._place = after, _Place.AFTER
            return before.rstrip()
        certain = len(before) - held_back_len(before, (self._tags.end,))
        certain = len(before[:certain].rstrip())
        self._held = before[certain:]
        return before[:certain]


def find_tokens(token_ids: Sequence[int], wanted: Sequence[int], begin: int = 0) -> int | None:
    """Where `wanted` first stands in `token_ids` from `begin` on."""
    wanted = list(wanted)
    if not wanted:
        return None
    places = range(begin, len(token_ids) - len(wanted) + 1)
    return next((place for place in places if list(token_ids[place : place + len(wanted)]) == wanted), None)

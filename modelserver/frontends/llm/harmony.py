"""Reads harmony, the format in which gpt-oss writes: messages in channels, each with a header.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

The template writes the first `<|start|>assistant`. Text that begins with no header is all answer: constrained texts
have no channels.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from modelserver.frontends.llm.events import Delta, ToolDelta
from modelserver.frontends.llm.tools import held_back_len, make_tool_id

# How a header may begin, and what ends a message.
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER_LEN = 512


class _Place(enum.Enum):
    BETWEEN = enum.auto()  # a header may begin
    HEADER = enum.auto()
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    DROPPED = enum.auto()  # a further call, where only one may be


class HarmonyReader:
    """Tells reasoning, text and calls of functions, however the text is cut. Arguments are told as they come.

    Calls are text where `has_calls` is false. Messages to anything but a function are reasoning: nothing here runs
    gpt-oss's own tools.
    """

    def __init__(self, *, has_calls: bool, is_parallel: bool = True) -> None:
        self._has_calls = has_calls
        self._max_calls = None if is_parallel else 1
        self._place = _Place.BETWEEN
        self._held = ""
        self._num_calls = 0
        self._has_arguments = False
        # Places of which something was told: a further message of the same kind begins a paragraph.
        self._told: set[_Place] = set()
        self._has_messages = self._begins_paragraph = False

    def count(self, token_ids: Sequence[int], start: Sequence[int], end: Sequence[int]) -> int | None:
        """How many of all the text's tokens were reasoning: those between `start`, a header, and `end`, a mark.

        None if there was reasoning and the header's tokens are not among them.
        """
        num_reasoning, place, ids = 0, 0, list(token_ids)
        has_start = False
        while place < len(ids):
            if not start or ids[place : place + len(start)] != list(start):
                place += 1
                continue
            has_start = True
            place += len(start)
            while place < len(ids) and ids[place : place + len(end)] != list(end):
                place, num_reasoning = place + 1, num_reasoning + 1
        return num_reasoning if has_start or _Place.REASONING not in self._told else None

    def push(self, text: str) -> Delta:
        """What is certain after this much more text."""
        delta = Delta()
        self._held += text
        while self._step(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """What is left when there is no more. An unfinished header is text if nothing came before it."""
        delta = Delta()
        held, self._held = self._held, ""
        if self._place in (_Place.BETWEEN, _Place.HEADER):
            if not self._has_messages:
                delta.say(held)
        else:
            self._tell(delta, held)
            self._end_message(delta)
        return delta

    def _step(self, delta: Delta) -> bool:
        """Go on as far as the text tells; whether there may be more to find."""
        if self._place is _Place.BETWEEN:
            return self._look_for_header()
        if self._place is _Place.HEADER:
            return self._read_header(delta)
        found = min(((at, end) for end in _ENDS if (at := self._held.find(end)) >= 0), default=None)
        if found is None or not self._has_messages:
            certain = len(self._held) - (held_back_len(self._held, _ENDS) if self._has_messages else 0)
            self._tell(delta, self._held[:certain])
            self._held = self._held[certain:]
            return False
        at, end = found
        self._tell(delta, self._held[:at])
        self._held = self._held[at:] if end in _BEGINNINGS else self._held[at + len(end) :]
        self._end_message(delta)
        return True

    def _look_for_header(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(_BEGINNINGS):
            self._place = _Place.HEADER
            return True
        if any(beginning.startswith(text) for beginning in _BEGINNINGS):
            return False
        self._place = _Place.TEXT
        return True

    def _read_header(self, delta: Delta) -> bool:
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            if len(self._held) <= _MAX_HEADER_LEN:
                return False
            self._place = _Place.TEXT
            return True
        self._held, self._has_messages, self._begins_paragraph = rest, True, True
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._begin_call(delta, recipient[1])
        else:
            is_reasoning = channel is not None and channel[1] == "analysis"
            self._place = _Place.REASONING if is_reasoning else _Place.TEXT
        return True

    def _begin_call(self, delta: Delta, recipient: str) -> None:
        if not recipient.startswith(_FUNCTIONS):
            self._place = _Place.REASONING
        elif not self._has_calls:
            self._place = _Place.TEXT
        elif self._max_calls is not None and self._num_calls >= self._max_calls:
            self._place = _Place.DROPPED
        else:
            self._place, self._has_arguments = _Place.CALL, False
            delta.call(ToolDelta(self._num_calls, "", make_tool_id(), recipient.removeprefix(_FUNCTIONS)))
            self._num_calls += 1

    def _tell(self, delta: Delta, text: str) -> None:
        if not text or self._place is _Place.DROPPED:
            return
        if self._place is _Place.CALL:
            self._has_arguments = self._has_arguments or not text.isspace()
            delta.call(ToolDelta(self._num_calls - 1, text))
            return
        if self._begins_paragraph and self._place in self._told:
            text = "\n\n" + text
        self._begins_paragraph = False
        self._told.add(self._place)
        if self._place is _Place.REASONING:
            delta.reason(text)
        else:
            delta.say(text)

    def _end_message(self, delta: Delta) -> None:
        if self._place is _Place.CALL and not self._has_arguments:
            delta.call(ToolDelta(self._num_calls - 1, "{}"))
        self._place = _Place.BETWEEN

"""Finds calls of tools in generated text, by a format of `tool_formats`.

A call is told when it is complete and its arguments are JSON, and never before: what turns out to be no call is text
for the user after all, unchanged. How the text was cut into pieces makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.frontends.llm.events import Delta, ToolDelta
from modelserver.frontends.llm.tool_formats import (
    FunctionCall,
    Layout,
    NotACallError,
    ToolFormat,
    call_of,
    calls_in_python,
    loads,
    make_call,
    typed,
)
from modelserver.frontends.llm.tools import held_back_len, make_tool_id

# Longer than any name with its marks: without arguments by then, it is not a call.
_MAX_HEAD_LEN = 512


class ToolTextReader:
    """A `ToolReader` of free text. `schemas` are those of the request's functions."""

    def __init__(
        self, tool_format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], *, is_parallel: bool = True
    ) -> None:
        self._format = tool_format
        self._schemas = schemas
        self._max_calls = None if is_parallel else 1
        self._num_calls = 0
        # Text that is not told yet: outside of calls what may be a mark or the space before one, else all of the call.
        self._held = ""
        self._calls: _Calls | None = None
        self._has_content = False
        self._is_after_call = False

    def push(self, text: str) -> Delta:
        delta = Delta()
        self._held += text
        while self._step(delta):
            pass
        return delta

    def finish(self) -> Delta:
        delta = Delta()
        if self._calls is not None:
            delta.say(self._calls.leave(self._held))
        elif self._num_calls == 0 or self._held.strip():
            delta.say(self._held)
        self._held = ""
        return delta

    def _step(self, delta: Delta) -> bool:
        """Go on as far as the text tells; whether there may be more to find."""
        if self._calls is None:
            return self._look_for_calls(delta)
        found = self._calls.next(self._held)
        if found is None:
            return False
        read, self._held = self._held[: found.num_read], self._held[found.num_read :]
        self._add(delta, found.calls)
        if not found.calls:
            self._calls = None
            self._tell(delta, read[found.text_from :])
        return bool(self._held)

    def _look_for_calls(self, delta: Delta) -> bool:
        start = self._held.lstrip()
        if self._format.bare and start[:1] in tuple(self._format.bare) and not self._has_content:
            self._held = start
            self._calls = _Calls(self._format, self._schemas, 0, is_bare=True)
            return True
        found = [(at, mark) for mark in self._format.opens if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda each: (each[0], -len(each[1])))
            # The space before calls goes with their mark.
            certain = len(self._held[:at].rstrip())
            self._tell(delta, self._held[:certain])
            self._held = self._held[certain:]
            self._calls = _Calls(self._format, self._schemas, at - certain + len(mark))
            return True
        certain = len(self._held) - held_back_len(self._held, self._format.opens)
        certain = len(self._held[:certain].rstrip())
        self._tell(delta, self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _tell(self, delta: Delta, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._has_content, self._is_after_call = True, False
            delta.say(text)

    def _add(self, delta: Delta, calls: list[FunctionCall]) -> None:
        for call in calls:
            self._is_after_call = True
            if self._max_calls is not None and self._num_calls >= self._max_calls:
                continue
            call_id = make_tool_id(self._format.id_prefix, self._format.id_len)
            delta.call(ToolDelta(self._num_calls, "", call_id, call.name))
            delta.call(ToolDelta(self._num_calls, call.arguments))
            self._num_calls += 1


@dataclass(frozen=True, slots=True)
class _Found:
    """So much of the text is read: calls, or, without any, their end, and text for the user from `text_from` on."""

    num_read: int
    calls: list[FunctionCall]
    text_from: int = 0


class _Calls:
    """Reads calls, one after the other, from text that grows and loses what was read.

    The first `skipped` characters are an opening mark.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        skipped: int,
        *,
        is_bare: bool = False,
    ) -> None:
        self._format = tool_format
        self._schemas = schemas
        self._position = skipped
        self._is_bare = is_bare
        self._scanner: _Scanner | None = None
        self._num_found = 0

    def next(self, text: str) -> _Found | None:
        """What comes next in `text`; None when more of it is needed."""
        return self._next_markup(text) if self._format.layout is Layout.MARKUP else self._next_value(text)

    def leave(self, text: str) -> str:
        """The text for the user, given that no more comes."""
        rest = text[self._position :]
        if not self._num_found:
            return text
        is_mark = self._scanner is None and any(mark.startswith(rest.strip()) for mark in ("", *self._format.between))
        return "" if is_mark else rest

    def _next_value(self, text: str) -> _Found | None:
        if self._scanner is None:
            if not self._skip(text) or not self._begin(text):
                return None
            if self._scanner is None:
                return self._over(self._position)
        end = self._scanner.find_end(text)
        if end is None:
            return None
        head, value = text[self._position : self._scanner.start], text[self._scanner.start : end]
        self._scanner = None
        try:
            return self._complete(end, self._read(head, value))
        except NotACallError:
            return self._over(end)

    def _complete(self, end: int, calls: list[FunctionCall]) -> _Found:
        self._num_found += len(calls)
        self._position = 0
        return _Found(end, calls)

    def _over(self, end: int) -> _Found:
        """The text before `end` is not a call. The first takes its mark with it, further marks are dropped."""
        return _Found(end, [], text_from=self._position if self._num_found else 0)

    def _skip(self, text: str) -> bool:
        """Pass over what says nothing; whether there is something else."""
        while True:
            while self._position < len(text) and text[self._position].isspace():
                self._position += 1
            rest = text[self._position :]
            mark = next((mark for mark in self._format.between if rest.startswith(mark)), None)
            if mark is not None:
                self._position += len(mark)
            else:
                return bool(rest) and not any(mark.startswith(rest) for mark in self._format.between)

    def _begin(self, text: str) -> bool:
        """Find where a value begins, if one does; whether enough is known to say so."""
        layout, at = self._format.layout, self._position
        opening = "[" if layout is Layout.PYTHON else "{["
        if text[at] in opening:
            self._scanner = _Scanner(at, "\"'" if layout is Layout.PYTHON else '"')
            return True
        if layout is not Layout.NAMED:
            return True
        brace = text.find("{", at, at + _MAX_HEAD_LEN)
        if brace < 0:
            return len(text) >= at + _MAX_HEAD_LEN
        self._scanner = _Scanner(brace, '"')
        return True

    def _read(self, head: str, value: str) -> list[FunctionCall]:
        if self._format.layout is Layout.PYTHON:
            calls = calls_in_python(value)
        elif head:
            assert self._format.head is not None, "only formats with heads have text there"
            match = self._format.head.fullmatch(head)
            if match is None:
                raise NotACallError
            calls = [make_call(match["name"], loads(value))]
        else:
            found = loads(value)
            calls = [call_of(item) for item in (found if isinstance(found, list) else [found])]
        if not calls or (self._is_bare and not all(call.name in self._schemas for call in calls)):
            raise NotACallError
        return calls

    def _next_markup(self, text: str) -> _Found | None:
        if not self._skip(text):
            return None
        tags = self._format
        assert tags.call is not None, "markup has a pattern"
        assert tags.argument is not None, "markup has a pattern"
        rest = text[self._position :]
        if not (rest.startswith(tags.call_open) or tags.call_open.startswith(rest)):
            return self._over(self._position)
        end = rest.find(tags.close)
        if end < 0:
            return None
        end_position = self._position + end + len(tags.close)
        match = tags.call.fullmatch(rest[:end])
        if match is None:
            return self._over(end_position)
        schema = self._schemas.get(match["name"], {}).get("properties")
        properties = schema if isinstance(schema, dict) else {}
        arguments: dict[str, Any] = {
            each["name"].strip(): typed(each["value"], properties.get(each["name"].strip()))
            for each in tags.argument.finditer(match["body"])
        }
        try:
            return self._complete(end_position, [make_call(match["name"], arguments)])
        except NotACallError:
            return self._over(end_position)


class _Scanner:
    """Finds where a bracketed value that begins at `start` ends, looking at every character once."""

    _INTERESTING = re.compile(r"[\[\]{}()\"'\\]")

    def __init__(self, start: int, quotes: str) -> None:
        self.start = start
        self._quotes = quotes
        self._position = start
        self._depth = 0
        self._quote = ""

    def find_end(self, text: str) -> int | None:
        """The index after the value; None when more text is needed."""
        while (match := self._INTERESTING.search(text, self._position)) is not None:
            character = match[0]
            if character == "\\" and self._quote:
                if match.end() == len(text):
                    self._position = match.start()
                    return None
                self._position = match.end() + 1
                continue
            self._position = match.end()
            if self._quote:
                if character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in "[{(":
                self._depth += 1
            elif character in "]})":
                self._depth -= 1
                if self._depth == 0:
                    return self._position
        self._position = len(text)
        return None

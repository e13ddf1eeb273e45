"""Calls of tools in text that was constrained to be nothing else: told as they are generated, piece by piece."""

from __future__ import annotations

import enum
import json

from modelserver.frontends.llm.events import Delta, Text, ToolDelta
from modelserver.frontends.llm.tools import make_tool_id

_SPACE = " \t\r\n"


class NamedToolReader:
    """A `ToolReader` of the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_begun = False

    def push(self, text: str) -> Delta:
        delta = Delta()
        if not self._is_begun:
            text = text.lstrip(_SPACE)
            if not text:
                return delta
            self._is_begun = True
            delta.call(ToolDelta(0, "", make_tool_id(), self._name))
        if text:
            delta.call(ToolDelta(0, text))
        return delta

    def finish(self) -> Delta:
        return Delta()


class _Place(enum.Enum):
    ARRAY = enum.auto()  # before, between and after calls
    MEMBER = enum.auto()  # before a key
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()  # before a value
    NAME = enum.auto()  # within the value of "name"
    ARGUMENTS = enum.auto()  # within the value of "parameters"
    ENDED = enum.auto()  # behind a value
    TEXT = enum.auto()  # behind what does not belong there


class RequiredToolReader:
    """A `ToolReader` of an array of objects with `name` and then `parameters`.

    Text that is not such an array, which the constraint rules out, is told as content.
    """

    def __init__(self) -> None:
        self._place = _Place.ARRAY
        self._num_calls = 0
        self._unsaid = ""  # what was read since the last that was told, and may be text after all
        self._token = ""  # the key or name that is being read, with its quotes
        self._key = ""
        self._is_named = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def push(self, text: str) -> Delta:
        if self._is_in(_Place.TEXT):
            return Delta([Text(text)] if text else [])
        delta = Delta()
        begin = 0  # of the arguments that are in this text and not told
        for at, character in enumerate(text):
            was_in_arguments = self._is_in(_Place.ARGUMENTS)
            self._take(delta, character)
            if self._is_in(_Place.TEXT):
                delta.say(self._unsaid + text[at + 1 :])
                return delta
            if self._is_in(_Place.ARGUMENTS) and not was_in_arguments:
                begin = at
            elif was_in_arguments and not self._is_in(_Place.ARGUMENTS):
                self._tell(delta, text[begin : at + 1])
        if self._is_in(_Place.ARGUMENTS):
            self._tell(delta, text[begin:])
        return delta

    def finish(self) -> Delta:
        return Delta()

    def _is_in(self, place: _Place) -> bool:
        return self._place is place

    def _take(self, delta: Delta, character: str) -> None:
        if self._is_in(_Place.ARGUMENTS):
            if self._ends_arguments(character):
                self._place = _Place.ENDED
            return
        self._unsaid += character
        if self._place in (_Place.KEY, _Place.NAME):
            self._read_string(delta, character)
        elif character not in _SPACE:
            self._read_mark(character)

    def _tell(self, delta: Delta, arguments: str) -> None:
        if arguments:
            delta.call(ToolDelta(self._num_calls - 1, arguments))

    def _ends_arguments(self, character: str) -> bool:
        """Take a character of the arguments; whether it is their last."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _read_string(self, delta: Delta, character: str) -> None:
        self._token += character
        if self._is_escaped:
            self._is_escaped = False
            return
        self._is_escaped = character == "\\"
        if character != '"' or len(self._token) == 1:
            return
        try:
            text = json.loads(self._token, strict=False).encode("utf-8", "replace").decode()
        except ValueError:
            self._place = _Place.TEXT
            return
        if self._place is _Place.KEY:
            self._key, self._place = text, _Place.COLON
            return
        delta.call(ToolDelta(self._num_calls, "", make_tool_id(), text))
        self._num_calls += 1
        self._is_named, self._place, self._unsaid = True, _Place.ENDED, ""

    def _read_mark(self, character: str) -> None:
        match self._place, character:
            case _Place.ARRAY, "[" | ",":
                pass
            case _Place.ARRAY, "]":
                self._unsaid = ""
            case _Place.ARRAY, "{":
                self._place, self._is_named = _Place.MEMBER, False
            case _Place.MEMBER, '"':
                self._place, self._token = _Place.KEY, character
            case _Place.COLON, ":":
                self._place = _Place.VALUE
            case _Place.VALUE, '"' if self._key == "name":
                self._place, self._token = _Place.NAME, character
            case _Place.VALUE, "{" if self._key in ("parameters", "arguments") and self._is_named:
                self._place, self._depth = _Place.ARGUMENTS, 1
            case _Place.ENDED, ",":
                self._place = _Place.MEMBER
            case _Place.ENDED, "}":
                self._place, self._unsaid = _Place.ARRAY, ""
            case _:
                self._place = _Place.TEXT

"""Flags: how the text of a flag becomes a value, and the error when it cannot.

This module handles the forms of Triton's command line (`--flag`, `--flag=true`, `--flag true`, repeated
flags) as values only. `server_options` lists the flags, `sources` says where their values come from.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelserver.core.numerals import is_digits, parse_float, parse_int
from modelserver.core.spelling import BOOL_EXPECTATION, FALSE_WORDS, TRUE_WORDS, parse_bool
from modelserver.errors import InvalidArgumentError

OptionValue = bool | int | float | str | tuple[str, ...] | None


class FlagState(enum.Enum):
    """How the server treats a flag."""

    ACTIVE = "in effect"
    # Accepted so that Triton's command lines work; a warning says that the flag has no effect.
    ACCEPTED = "accepted, no effect yet"
    # Replaced by another flag: it sets that flag's value, or has no effect any more.
    DEPRECATED = "deprecated"


@dataclass(frozen=True, slots=True)
class Flag:
    """The properties of an option besides its name, type and default."""

    group: str
    help: str
    state: FlagState = FlagState.ACTIVE
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    # A number that may also be written as true (1) or false (0).
    takes_switch: bool = False
    # Shown in the help instead of the type.
    metavar: str = ""
    # Not one of Triton's flags.
    is_ours: bool = False
    # Triton's sentence for a value that it refuses.
    refusal: str = ""


def flag(group: str, text: str, **details: Any) -> Mapping[str, Flag]:
    """Metadata of a dataclass field that is an option."""
    return {"flag": Flag(group, text, **details)}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the table: its field's name, type, default and flag."""

    name: str
    kind: type
    is_repeated: bool
    is_nullable: bool
    default: OptionValue
    flag: Flag

    @property
    def flag_name(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "MODELSERVER_" + self.name.upper()

    @property
    def expectation(self) -> str:
        """The accepted values, in words."""
        if self.flag.choices:
            return "one of " + ", ".join(self.flag.choices)
        if self.kind is bool:
            return BOOL_EXPECTATION
        if self.kind is str:
            return (self.flag.metavar or "text") + (", not empty" if self.flag.minimum else "")
        noun = "an integer" if self.kind is int else "a number"
        low, high = self.flag.minimum, self.flag.maximum
        if low is not None and high is not None:
            return f"{noun} from {low:g} to {high:g}"
        return noun if low is None else f"{noun} of at least {low:g}"

    def parse(self, text: str, *, source: str) -> bool | int | float | str:
        """Parse `text` as a value. Raises InvalidArgumentError that names `source`, the expected form and the text."""
        if self.kind is bool:
            switch = parse_bool(text)
            if switch is None:
                raise self._bad(text, source)
            return switch
        if self.kind is str:
            if self.flag.choices and text not in self.flag.choices:
                matching = [choice for choice in self.flag.choices if choice.lower() == text.lower()]
                if not matching:
                    raise self._bad(text, source)
                return matching[0]
            if self.flag.minimum and not text:
                raise self._bad(text, source)
            return text
        if self.flag.takes_switch and not text.isdecimal() and (switch := parse_bool(text)) is not None:
            return int(switch)
        try:
            number: int | float = parse_int(text) if self.kind is int else parse_float(text)
        except ValueError:
            raise self._bad(text, source) from None
        low, high = self.flag.minimum, self.flag.maximum
        if (low is not None and number < low) or (high is not None and number > high):
            raise self._bad(text, source)
        return number

    def _bad(self, text: str, source: str) -> InvalidArgumentError:
        message = f"{source} expects {self.expectation}, got '{text}'"
        # The words before our own are Triton's.
        first = f'Bad option: "{self.flag_name}". ' if source.startswith("--") else ""
        return InvalidArgumentError(first + (f"{self.flag.refusal} " if self.flag.refusal else "") + message)


FLAG = "--api"
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ApiChoice:
    """An operator's choice for one API; with `port` None the API keeps its own default port."""

    is_served: bool = True
    port: int | None = None


def parse_api_choices(texts: Sequence[str]) -> dict[str, ApiChoice]:
    """Choices by the names of APIs, in lower case. Raises InvalidArgumentError."""
    choices: dict[str, ApiChoice] = {}
    for text in texts:
        name, equals, value = (part.strip().lower() for part in text.partition("="))
        if not name or not equals:
            raise InvalidArgumentError(f"{FLAG} expects NAME=on, NAME=off or NAME=PORT, got '{text:.60}'")
        if name in choices:
            raise InvalidArgumentError(f"{FLAG}: the API '{name:.60}' is given twice; keep one of them")
        choices[name] = _parse_choice(name, value)
    return choices


def _parse_choice(name: str, value: str) -> ApiChoice:
    if is_digits(value) and len(value) <= 5 and value not in ("0", "1") and int(value) <= _MAX_PORT:
        return ApiChoice(port=int(value))
    if value in TRUE_WORDS:
        return ApiChoice()
    if value in FALSE_WORDS:
        return ApiChoice(is_served=False)
    raise InvalidArgumentError(
        f"{FLAG}={name:.60}: expected on, off or a port from 2 to {_MAX_PORT}, got '{value:.60}'"
    )

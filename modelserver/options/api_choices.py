"""`--api`: which APIs are served, and on which ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.core.numerals import is_digits
from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import FALSE_WORDS, TRUE_WORDS

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

"""An allow-list for model names, because names become paths, URLs and metric labels."""

from __future__ import annotations

import re

from modelserver.errors import InvalidArgumentError

# Letters and digits of any script, then a few marks; never a separator, a space or a control character.
_NAME = re.compile(r"\w[\w.+@:=~-]*")
_LONGEST_NAME_BYTES = 255


def name_problem(name: str) -> str | None:
    """Why `name` is not a valid model name; None if it is."""
    if not name:
        return "it is empty"
    if len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME_BYTES:
        return f"it is longer than {_LONGEST_NAME_BYTES} bytes"
    if ".." in name:
        return "it contains '..'"
    if not _NAME.fullmatch(name):
        return "it must start with a letter, a digit or '_' and hold only letters, digits and _ . + @ : = ~ -"
    return None


def check_model_name(name: str) -> None:
    """Raise InvalidArgumentError for an invalid model name."""
    problem = name_problem(name)
    if problem is None:
        return
    if not name.strip():
        raise InvalidArgumentError(
            f"Model name cannot be empty. Please enter a valid name to deploy. Got {name[:300]!r}"
        )
    if name in (".", "..") or "/" in name or "\\" in name:
        problem = f"model name must not contain path traversal characters: {problem}"
        raise InvalidArgumentError(f"invalid model name '{name[:300]}', {problem}")
    raise InvalidArgumentError(f"invalid model name {name[:300]!r}: {problem}")

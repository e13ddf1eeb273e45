"""The files of reports: checked before the measurement, since a run may take an hour."""

from __future__ import annotations

import os
from pathlib import Path

from modelserver.errors import InvalidArgumentError, ServerError


def check_file(path: Path, flag: str) -> None:
    """Raises InvalidArgumentError that names the flag when the file could not be written."""
    if path.is_dir():
        raise InvalidArgumentError(f"{flag}: '{path}' is a directory; name a file")
    if not path.exists() and not path.parent.is_dir():
        raise InvalidArgumentError(f"{flag}: there is no directory '{path.parent}' to write '{path.name}' into")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidArgumentError(f"{flag}: cannot write '{path}': permission denied")


def write_file(path: Path, text: str, flag: str) -> None:
    """Raises ServerError that names the flag, for what has changed since it was checked."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServerError(f"{flag}: cannot write '{path}': {error.strerror}") from None

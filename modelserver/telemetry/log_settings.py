"""The logging extension: log settings that are read and changed while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.telemetry.audit import audited
from modelserver.telemetry.log_tail import LogTail

# The server's own loggers; libraries log from WARNING on.
OWN_LOGGERS = ("modelserver", "modelserver_backends")

FORMATS = ("default", "ISO8601", "json")
_MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The values, under the protocol's names."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    def changed(self, changes: Mapping[str, Any]) -> LogSettings:
        """With these values; one that is None stays as it is.

        Raises InvalidArgumentError for an unknown setting or a value of another type, UnsupportedError for the file:
        a client that may change settings must not choose the file that the server writes.
        """
        known = asdict(self)
        given: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise InvalidArgumentError(
                    f"unknown log setting '{name:.100}', expected one of {', '.join(known)}{nearest_hint(name, known)}"
                )
            if value is None:
                continue
            if name == "log_file":
                raise UnsupportedError("log file location can not be updated through network protocol")
            given[name] = _checked(name, value)
        return replace(self, **given)


class LogControl:
    """The current settings, the followers of changes, and the newest lines. Event loop thread only."""

    def __init__(self, settings: LogSettings | None = None) -> None:
        self.settings = settings or LogSettings()
        # Lines of the process's log if the server owns it; else empty.
        self.tail = LogTail()
        self._followers: list[Callable[[LogSettings], None]] = []

    def follow(self, follower: Callable[[LogSettings], None]) -> None:
        """Call `follower` with the settings after each change."""
        self._followers.append(follower)

    def update(self, changes: Mapping[str, Any]) -> LogSettings:
        """Change some settings, all or none; the settings then. Raises as `LogSettings.changed` does."""
        with audited("log settings", ", ".join(changes)):
            settings = self.settings.changed(changes)
        if settings != self.settings:
            self.settings = settings
            for follower in self._followers:
                follower(settings)
        return settings


def _checked(name: str, value: Any) -> bool | int | str:
    if name == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= _MAX_UINT32:
            raise InvalidArgumentError(f"log setting '{name}' must be an unsigned integer, got {value!r:.40}")
        return value
    if name == "log_format":
        if value not in FORMATS:
            raise InvalidArgumentError(f"log setting '{name}' must be one of {', '.join(FORMATS)}, got {value!r:.40}")
        return str(value)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"log setting '{name}' must be a boolean, got {value!r:.40}")
    return value


def set_own_level(level: int) -> None:
    """Set the level of the server's own loggers."""
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level)

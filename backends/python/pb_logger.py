"""`pb_utils.Logger`: a model's lines in the server's log."""

from __future__ import annotations

import enum
import logging

from modelserver.backend.child import write_record

from .pb_argument import text_of


class LogLevel(enum.IntEnum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    __str__ = enum.Enum.__str__


_Level = LogLevel  # where the name is the logger's

_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


class Logger:
    """Writes to the server's log; VERBOSE is the server's debug level."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: _Level = LogLevel.INFO) -> None:
        """Raises TypeError for a message that is not text, and for a level that is not a LogLevel."""
        if not isinstance(level, LogLevel):
            raise TypeError(f"level must be one of Logger.LogLevel, got {level!r}")
        write_record(_LEVELS[level], text_of("message", message))

    @staticmethod
    def log_info(message: str | bytes) -> None:
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        Logger.log(message, LogLevel.VERBOSE)

"""Loading and unloading of other models from within a model."""

from __future__ import annotations

import enum
import logging
from typing import Any

import numpy as np

from modelserver.backend import ServerError, child
from modelserver.backend.child import write_record

from .pb_call import Execution, Phase
from .pb_error import TritonModelException, text_of

_LOAD_FAILURE = "Failed to load model: "


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model; returns when it serves. `config` is JSON, `files` are `{"file:1/model.py": bytes}`.

    Works in `--model-control-mode=explicit` only. Raises TritonModelException.
    """
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(f"{_LOAD_FAILURE}files must be a dict, got {type(files).__name__}")
    wanted = {text_of("a key of files", path): content for path, content in (files or {}).items()}
    _ask(
        _LOAD_FAILURE,
        "load_model",
        name=text_of("model_name", model_name),
        config=text_of("config", config),
        files=wanted,
    )


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; it finishes accepted requests. Raises TritonModelException."""
    name = text_of("model_name", model_name)
    if not isinstance(unload_dependents, bool | np.bool_):
        raise TypeError(f"unload_dependents must be a bool, got {type(unload_dependents).__name__}")
    _ask("Failed to unload model: ", "unload_model", name=name, unload_dependents=bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str | int = "") -> bool:
    """Whether the model can answer now; false for an unknown model."""
    name = text_of("model_name", model_name)
    version = str(model_version) if isinstance(model_version, int) else text_of("model_version", model_version)
    return bool(_ask("Failed to check model readiness: ", "is_model_ready", name=name, version=version))


def _ask(failure: str, topic: str, **arguments: Any) -> Any:
    if Execution.phase is Phase.FINISHING:
        raise TritonModelException(f"{failure}not possible in finalize")
    if Execution.phase is Phase.STARTING:
        arguments["while_loading"] = Execution.model_name
    try:
        return child.ask(topic, **arguments)
    except ServerError as error:
        raise TritonModelException(f"{failure}{error.message}") from error
    except RuntimeError as error:
        raise TritonModelException(f"{failure}possible inside a model only") from error


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

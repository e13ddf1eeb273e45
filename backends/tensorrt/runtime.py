"""The TensorRT libraries: which one, imported when it is needed, and what they write into their logs.

The modules `tensorrt`, `tensorrt_lean` and `tensorrt_rtx` have the same classes, so the code takes the module as a
value, `trt`. What only some have is asked for by `hasattr`, never by a version.
"""

from __future__ import annotations

import collections
import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from modelserver.backend import InvalidArgumentError, UnavailableError

from .plan import Flavour

log = logging.getLogger(__name__)

_MODULES: Mapping[Flavour, Sequence[str]] = {
    Flavour.TENSORRT: ("tensorrt", "tensorrt_bindings"),
    Flavour.RTX: ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
# The lean runtime runs engines, but builds none, and only those that are version compatible.
_LEAN = ("tensorrt_lean", "tensorrt_lean_bindings")
PACKAGES = {
    Flavour.TENSORRT: "pip install 'modelserver-py[tensorrt]' (tensorrt; with CUDA 12: tensorrt-cu12)",
    Flavour.RTX: "pip install 'modelserver-py[tensorrt-rtx]' (tensorrt_rtx_cu13)",
}
# Deserialising is not thread safe, and plugins are loaded into the process: one at a time, whatever the library.
library_lock = threading.Lock()
_KEPT_LINES = 32
_loggers: dict[str, Any] = {}
_initialised: set[str] = set()


def find_library(flavour: Flavour, *, allow_lean: bool = False) -> ModuleType:
    """The module for engines of this flavour. Raises UnavailableError with what to install, or what is broken."""
    names = [*_MODULES[flavour], *(_LEAN if allow_lean and flavour is Flavour.TENSORRT else ())]
    broken = ""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in names:  # it is there, and something that it needs is not
                broken = broken or f"{name}: {error}"
            continue
        except (ImportError, OSError, RuntimeError) as error:
            broken = broken or f"{name}: {error}"
            continue
        if hasattr(module, "Runtime"):
            return module
        broken = broken or f"{name} has no class Runtime; another package has that name"
    if broken:
        raise UnavailableError(f"{flavour.title} is installed and cannot be imported ({broken}); {PACKAGES[flavour]}")
    raise UnavailableError(f"{flavour.title} is not installed: {PACKAGES[flavour]}")


def library_version(trt: ModuleType) -> str:
    return str(getattr(trt, "__version__", "of unknown version"))


def logger_of(trt: ModuleType) -> Any:
    """The one `trt.ILogger` of a module. TensorRT keeps the first that it sees for the life of the process."""
    with _loggers_lock:
        if trt.__name__ not in _loggers:
            _loggers[trt.__name__] = _make_logger(trt)
        return _loggers[trt.__name__]


_loggers_lock = threading.Lock()


def initialise_plugins(trt: ModuleType, paths: Sequence[str]) -> None:
    """Register the library's own plugins and those of `paths`, each once. Hold `library_lock`.

    Raises InvalidArgumentError for a plugin that cannot be loaded: it is code, which runs when it is loaded.
    """
    if trt.__name__ not in _initialised:
        if hasattr(trt, "init_libnvinfer_plugins"):
            trt.init_libnvinfer_plugins(logger_of(trt), "")
        _initialised.add(trt.__name__)
    for path in paths:
        key = f"{trt.__name__}:{path}"
        if key in _initialised:
            continue
        mark = logger_of(trt).mark()
        if trt.get_plugin_registry().load_library(path) is None:
            reason = logger_of(trt).errors_since(mark)
            raise InvalidArgumentError(f"the TensorRT plugin library {path} cannot be loaded: {reason}")
        _initialised.add(key)


def _make_logger(trt: Any) -> Any:
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
        trt.ILogger.VERBOSE: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]  # a base that is only known at run time
        """Forwards to our log, and keeps the last errors: a call that fails says why nowhere else."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._lines = LogLines()

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level >= logging.WARNING:
                self._lines.add(str(message), is_error=level >= logging.ERROR)
            # Errors are raised by the caller; here they would be logged twice.
            log.log(min(level, logging.INFO) if level >= logging.ERROR else level, "%s", message)

        def mark(self) -> int:
            """A moment, for `errors_since`."""
            return self._lines.mark()

        def errors_since(self, mark: int) -> str:
            return self._lines.errors_since(mark)

        def warnings_since(self, mark: int) -> list[str]:
            return self._lines.warnings_since(mark)

    return Logger()


class LogLines:
    """The last warnings and errors, each with the thread that wrote it; TensorRT writes from threads of its own too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both below
        self._lines: collections.deque[tuple[int, int, bool, str]] = collections.deque(maxlen=_KEPT_LINES)
        self._count = 0

    def add(self, line: str, *, is_error: bool) -> None:
        with self._lock:
            self._count += 1
            self._lines.append((self._count, threading.get_ident(), is_error, line))

    def mark(self) -> int:
        return self._count

    def errors_since(self, mark: int) -> str:
        """The errors since `mark`, of this thread if there are any, in one line."""
        with self._lock:
            found = [(owner, line) for number, owner, is_error, line in self._lines if number > mark and is_error]
        own = [line for owner, line in found if owner == threading.get_ident()] or [line for _, line in found]
        # Without a GPU every error is followed by one about the GPU, which is not the reason.
        reasons = [line for line in own if "catchCudaError" not in line] or own
        return "; ".join(dict.fromkeys(reasons)) or "TensorRT says nothing"

    def warnings_since(self, mark: int) -> list[str]:
        with self._lock:
            return [line for number, _, is_error, line in self._lines if number > mark and not is_error]

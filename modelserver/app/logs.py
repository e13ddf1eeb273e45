"""How the log looks and where it goes. Logging never blocks: a thread of its own writes, a full queue drops lines."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from modelserver.errors import InvalidArgumentError
from modelserver.options.server_options import ServerOptions
from modelserver.telemetry.log_settings import OWN_LOGGERS, LogSettings, set_own_level
from modelserver.telemetry.log_tail import LogTail, TailHandler

QUEUE_LENGTH = 10_000
# How long `close` waits for a slow reader of the log.
CLOSE_TIMEOUT_S = 2.0


class LogWriter:
    """Owns the log's thread from `start_logs` to `close`, which writes what is still queued.

    `tail` has the newest lines. With `takes_all` the lines of libraries and of the program are in the log too, and
    nowhere else; without it only the server's own.
    """

    def __init__(
        self, handler: logging.Handler, levels: frozenset[int], own_level: int, *, takes_all: bool = True
    ) -> None:
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_LENGTH)
        self._output = handler
        self._input = _DroppingHandler(self._records)
        self._levels = levels
        self._input.addFilter(lambda record: _severity(record.levelno) in self._levels)
        self.tail = LogTail()
        self._to_tail = TailHandler(self.tail)
        self._to_tail.setFormatter(handler.formatter)
        # The tail first: a blocked reader of the log does not delay requests for the tail.
        self._listener = _Listener(self._records, self._to_tail, handler)
        taken = [logging.getLogger()] if takes_all else [logging.getLogger(name) for name in OWN_LOGGERS]
        self._before = [(each, each.handlers[:], each.level, each.propagate) for each in taken]
        for each in taken:
            each.handlers[:] = [self._input]
            each.propagate = False  # of no effect on the root
            each.setLevel(logging.WARNING)
        set_own_level(own_level)
        self._listener.start()

    def apply(self, settings: LogSettings) -> None:
        """Log with these settings from now on; from any thread. Lines already queued get the new format."""
        formatter = _FORMATTERS[settings.log_format]()
        self._output.setFormatter(formatter)
        self._to_tail.setFormatter(formatter)
        self._levels = _levels(settings)
        set_own_level(own_level(settings))

    def close(self) -> None:
        """Write the queued lines and restore the loggers."""
        set_own_level(logging.NOTSET)
        for logger, handlers, level, propagates in self._before:
            logger.handlers[:] = handlers
            logger.propagate = propagates
            logger.setLevel(level)
        if not self._listener.finish(CLOSE_TIMEOUT_S):
            return
        if self._input.num_dropped:
            self._output.handle(_record(f"{self._input.num_dropped} log lines were dropped: the log's reader is slow"))
        self._output.close()


def start_logs(options: ServerOptions, *, takes_all: bool = True) -> LogWriter:
    """Send the process's log where the options say, or without `takes_all` the server's own lines.

    Raises InvalidArgumentError for a file that cannot be opened.
    """
    handler = _FileHandler(options.log_file) if options.log_file else _QuietHandler(sys.stderr)
    settings = log_settings(options)
    handler.setFormatter(_FORMATTERS[settings.log_format]())
    return LogWriter(handler, _levels(settings), own_level(settings), takes_all=takes_all)


def log_settings(options: ServerOptions) -> LogSettings:
    """The settings that the server starts with."""
    return LogSettings(
        options.log_file,
        options.log_info,
        options.log_warning,
        options.log_error,
        options.log_verbose,
        options.log_format,
    )


def _levels(settings: LogSettings) -> frozenset[int]:
    chosen = {
        logging.INFO: settings.log_info,
        logging.WARNING: settings.log_warning,
        logging.ERROR: settings.log_error,
        logging.DEBUG: settings.log_verbose_level > 0,
    }
    return frozenset(level for level, is_on in chosen.items() if is_on)


def own_level(settings: LogSettings) -> int:
    return logging.DEBUG if settings.log_verbose_level else logging.INFO


class TextFormatter(logging.Formatter):
    """`2026-11-21 13:18:40.123 INFO  server: message`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self._time(record)} {record.levelname:<7} {_room(record.name)}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text

    def _time(self, record: logging.LogRecord) -> str:
        moment = time.localtime(record.created)
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', moment)}.{int(record.msecs):03d}"


class Iso8601Formatter(TextFormatter):
    """As text, with the time as `2026-11-21T13:18:40.123Z`."""

    def _time(self, record: logging.LogRecord) -> str:
        moment = time.gmtime(record.created)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{int(record.msecs):03d}Z"


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, a record's own `fields`, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


_FORMATTERS = {"default": TextFormatter, "ISO8601": Iso8601Formatter, "json": JsonFormatter}


class _DroppingHandler(logging.handlers.QueueHandler):
    """Puts records into a bounded queue and counts those that find it full."""

    num_dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # The writer is a thread of this process: only the arguments must be rendered, before they can change.
        record.msg, record.args = record.getMessage(), None
        return record


class _Listener(logging.handlers.QueueListener):
    """The writing thread, with a bounded wait for its end. A None in the queue ends it."""

    def __init__(self, records: queue.Queue[Any], *outputs: logging.Handler) -> None:
        super().__init__(records, *outputs)
        self._records = records

    def finish(self, timeout_s: float) -> bool:
        """Write the queued lines; False if the output did not take them within `timeout_s`."""
        thread = self._thread
        assert thread is not None, "the listener was started"
        try:
            self._records.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        thread.join(timeout_s)
        return not thread.is_alive()


class _QuietHandler(logging.StreamHandler[TextIO]):
    """Writes lines; a reader that has left (a closed pipe) causes no error and no warning."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        del record


class _FileHandler(_QuietHandler):
    """Writes to a named file. If it was moved or removed, as logrotate does, the next line creates it again."""

    def __init__(self, name: str) -> None:
        super().__init__(_open(name))
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        self._follow()
        super().emit(record)

    def close(self) -> None:
        super().close()
        with suppress(OSError):  # a full disk that refused earlier lines also refuses the rest
            self.stream.close()

    def _follow(self) -> None:
        """Write to the file that has the name now; if it cannot be created, to the old one."""
        try:
            if os.path.samestat(Path(self._name).stat(), os.fstat(self.stream.fileno())):
                return
        except FileNotFoundError:
            pass
        except OSError:  # its directory cannot be read
            return
        with suppress(InvalidArgumentError):
            old, self.stream = self.stream, _open(self._name)
            with suppress(OSError):
                old.close()


def _open(name: str) -> TextIO:
    try:
        return Path(name).open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise InvalidArgumentError(f"--log-file: cannot open '{name}': {error.strerror}") from None


def _severity(level: int) -> int:
    """The standard level that decides whether a record is wanted."""
    return max(logging.DEBUG, min(logging.ERROR, level // 10 * 10))


def _room(name: str) -> str:
    return name.removeprefix("modelserver.").removeprefix("modelserver_")


def _record(message: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)

"""The log's formats, levels and places, and that a slow reader stops nobody."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until_true

from modelserver.app.logs import QUEUE_LENGTH, LogWriter, start_logs
from modelserver.errors import InvalidArgumentError
from modelserver.options.server_options import ServerOptions

logger = logging.getLogger("modelserver.app.server")


@contextmanager
def logs(**options: Any) -> Iterator[LogWriter]:
    writer = start_logs(ServerOptions(**options))
    try:
        yield writer
    finally:
        writer.close()


def written(tmp_path: Path, **options: Any) -> str:
    """What a few records of every level leave in the file."""
    file = tmp_path / "log"
    with logs(log_file=str(file), **options):
        logger.debug("decided %s", "this")
        logger.info("started %d", 1)
        logger.warning("careful")
        logger.error("broken")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("library trouble")
    return file.read_text()


def test_text_has_time_level_room_and_message(tmp_path: Path) -> None:
    first = written(tmp_path).splitlines()[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    app\.server: started 1", first)


def test_iso8601_is_utc(tmp_path: Path) -> None:
    first = written(tmp_path, log_format="ISO8601").splitlines()[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    app\.server: started 1", first)


def test_json_is_an_object_per_line(tmp_path: Path) -> None:
    first = json.loads(written(tmp_path, log_format="json").splitlines()[0])
    assert first.pop("time").endswith("Z")
    assert first == {"level": "INFO", "logger": "modelserver.app.server", "message": "started 1"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["started 1", "careful", "broken", "library trouble"]),
        ({"log_verbose": 1}, ["decided this", "started 1", "careful", "broken", "library trouble"]),
        ({"log_info": False}, ["careful", "broken", "library trouble"]),
        ({"log_warning": False}, ["started 1", "broken"]),
        ({"log_error": False}, ["started 1", "careful", "library trouble"]),
    ],
)
def test_each_level_has_its_flag(tmp_path: Path, options: dict[str, Any], expected: list[str]) -> None:
    lines = written(tmp_path, **options).splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == expected


def test_tracebacks_are_written_in_every_format(tmp_path: Path) -> None:
    for log_format in ("default", "ISO8601", "json"):
        file = tmp_path / log_format
        with logs(log_file=str(file), log_format=log_format):
            try:
                raise ValueError("the reason")
            except ValueError:
                logger.exception("failed")
        assert "ValueError: the reason" in file.read_text()


def test_a_file_that_cannot_be_opened_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--log-file: cannot open .*No such file"):
        start_logs(ServerOptions(log_file=str(tmp_path / "missing" / "log")))


def test_the_root_logger_is_given_back() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    with logs():
        assert root.handlers != before[0]
    assert (root.handlers, root.level) == before


def test_a_reader_that_stands_still_stops_nobody_and_the_loss_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for a busy machine to write the lines.
    monkeypatch.setattr("modelserver.app.logs.CLOSE_TIMEOUT_S", 60.0)
    file = tmp_path / "log"
    writer = start_logs(ServerOptions(log_file=str(file)))
    writer._output.acquire()  # the writing thread waits for this lock
    try:
        for number in range(QUEUE_LENGTH + 10):
            logger.info("%d", number)
    finally:
        writer._output.release()
        writer.close()
    lines = file.read_text().splitlines()
    assert QUEUE_LENGTH <= len(lines) <= QUEUE_LENGTH + 3
    assert re.search(r"\d+ log lines were dropped", lines[-1])


def test_a_closed_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed)
    with logs():
        closed.close()
        logger.error("nobody reads this")


def test_a_file_that_is_moved_or_removed_is_made_anew(tmp_path: Path) -> None:
    """As logrotate does it, without a signal."""
    directory = tmp_path / "logs"
    file, away = directory / "log", tmp_path / "away"
    directory.mkdir()

    def log(line: str, where: Path) -> None:
        logger.info(line)
        until_true(lambda: where.exists() and where.read_text().endswith(f": {line}\n"), f"{line} in {where}")

    with logs(log_file=str(file)):
        log("first", file)
        file.rename(directory / "log.1")
        log("after a move", file)
        file.unlink()
        log("after a removal", file)
        directory.rename(away)
        log("nowhere to make it", away / "log")
        directory.mkdir()
        log("there it is again", file)
    assert len(file.read_text().splitlines()) == 1
    assert len((away / "log").read_text().splitlines()) == 2
    assert len((away / "log.1").read_text().splitlines()) == 1

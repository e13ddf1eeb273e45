"""A child's output in the log: whole lines, long ones cut, floods dropped and counted; the clock is given."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from modelserver.execution.process.child_log import ChildOutput


class Now:
    """A clock that stands still until it is set."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def messages() -> Iterator[list[logging.LogRecord]]:
    """What is logged, as it comes."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("modelserver.execution.process.child_log")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield records
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def _texts(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


def test_lines_come_in_pieces(now: Now, messages: list[logging.LogRecord]) -> None:
    output = ChildOutput("m_0", now_s=now)
    for piece in (b"one\ntw", b"o", b"\n\nthr"):
        output.feed(piece)
    assert _texts(messages) == ["m_0: one", "m_0: two", "m_0: "]
    output.finish()
    assert _texts(messages)[-1] == "m_0: thr"
    assert output.tail() == ("one", "two", "", "thr")


@pytest.mark.parametrize("piece", [1 << 16, 1000, 1 << 20])
def test_a_line_without_end_is_one_line_and_cut(now: Now, messages: list[logging.LogRecord], piece: int) -> None:
    output = ChildOutput("m_0", now_s=now)
    size = 1 << 20
    for start in range(0, size, piece):
        output.feed(b"x" * min(piece, size - start))
    output.feed(b"\nnext\n")
    cut = 8 << 10
    assert _texts(messages) == [f"m_0: {'x' * cut} ... ({size - cut} bytes more)", "m_0: next"]


def test_a_flood_is_dropped_and_counted(now: Now, messages: list[logging.LogRecord]) -> None:
    output = ChildOutput("m_0", lines_per_s=5, now_s=now)
    for number in range(1000):
        output.feed(b"line %d\n" % number)
    assert _texts(messages) == [f"m_0: line {number}" for number in range(50)]
    assert output.tail()[-1] == "line 999", "what was dropped is kept for the report of the end"
    now.seconds += 2.0
    output.feed(b"after a while\n")
    [summary, line] = messages[50:]
    assert line.getMessage() == "m_0: after a while"
    assert summary.levelno == logging.WARNING
    assert summary.getMessage() == (
        "m_0: 950 lines of its output, 7550 bytes, were dropped: it writes more than 5 lines a second "
        "(--model-output-lines-per-sec)"
    )


def test_a_flood_that_goes_on_is_mentioned_now_and_then(now: Now, messages: list[logging.LogRecord]) -> None:
    output = ChildOutput("m_0", lines_per_s=10, now_s=now)
    for _ in range(60):
        output.feed(b"x\n" * 1000)
        now.seconds += 1.0
    assert len(messages) < 60 * 10 + 100 + 61
    output.finish()
    assert messages[-1].levelno == logging.WARNING


def test_long_lines_count_for_several(now: Now, messages: list[logging.LogRecord]) -> None:
    output = ChildOutput("m_0", lines_per_s=100, now_s=now)
    output.feed((b"x" * 8000 + b"\n") * 1000)
    assert len(messages) == 1000 // 41


def test_without_a_limit_everything_is_logged(now: Now, messages: list[logging.LogRecord]) -> None:
    output = ChildOutput("m_0", lines_per_s=0, now_s=now)
    output.feed(b"x\n" * 5000)
    assert len(messages) == 5000

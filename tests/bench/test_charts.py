"""Axes and numbers of charts."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from modelserver.bench.charts import (
    LETTER_HEIGHT,
    LETTER_WIDTH,
    Part,
    Point,
    Series,
    histogram,
    line_chart,
    short,
    stacked_bars,
    ticks,
)


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


@pytest.mark.parametrize("length", [3, 40, 90])
def test_every_label_lies_within_its_picture(length: int) -> None:
    name = "x" * length
    points = [Point(number, 10.0 - number, name, "10") for number in range(1, 10)]
    for text in (
        stacked_bars([(name, [Part("p", 0, 5.0)]), ("short", [Part("p", 0, 2.0)])], title="t", unit="/s"),
        line_chart([Series(name, 0, points)], title="t", x_name="x", y_name="y"),
        histogram((1.0, 2.0, 4.0), (3, 1), [("p50", 1.0), ("p99.9", 4.0)], title="t"),
    ):
        picture = ElementTree.fromstring(text.partition("<p ")[0])
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        for label in picture.iter("text"):
            if "transform" in label.attrib:
                continue
            wide = LETTER_WIDTH * len("".join(label.itertext()).removeprefix(name) or name)
            x, y = float(label.attrib["x"]), float(label.attrib["y"])
            share = {"end": 1.0, "middle": 0.5}.get(label.get("text-anchor", ""), 0.0)
            assert x - share * wide >= 0, label.attrib
            assert x + (1 - share) * wide <= width, label.attrib
            assert LETTER_HEIGHT <= y + 1 <= height, label.attrib


def test_a_histogram_of_nothing_is_nothing() -> None:
    assert histogram((), (), (), title="t") == ""
    assert histogram((1.0, 2.0, 4.0), (3, 1), [("p50", 1.5)], title="t").count("<rect") == 2

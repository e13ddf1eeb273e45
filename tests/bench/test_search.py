"""Which levels are measured."""

from __future__ import annotations

import pytest

from modelserver.bench.search import BinarySearch, LinearSearch, ListSearch, LoadRange, Search, parse_range
from modelserver.errors import InvalidArgumentError


def levels(search: Search, limit: float = 1e9) -> list[float]:
    """The levels, when those above `limit` are over the latency threshold."""
    found = []
    for level in search:
        found.append(level)
        search.report(level <= limit)
        assert len(found) < 100, "the search does not end"
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", LoadRange(4)),
        ("1:8", LoadRange(1, 8, 1)),
        ("1:8:2", LoadRange(1, 8, 2)),
        ("1:0:4", LoadRange(1, 0, 4)),
    ],
)
def test_ranges(text: str, expected: LoadRange) -> None:
    assert parse_range(text, "--concurrency-range", is_whole=True) == expected


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "0", "-1", "4:2", "1:4:0", "1.5"])
def test_wrong_ranges_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--concurrency-range expects"):
        parse_range(text, "--concurrency-range", is_whole=True)


def test_a_range_of_rates_may_have_fractions() -> None:
    assert levels(LinearSearch(parse_range("0.1:0.3:0.1", "--x", is_whole=False))) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        (LoadRange(3), 1e9, [3]),
        (LoadRange(1, 8, 3), 1e9, [1, 4, 7]),
        (LoadRange(1, 8, 3), 3, [1, 4]),
        (LoadRange(1, 0, 2), 6, [1, 3, 5, 7]),
    ],
)
def test_linear_search_ends_at_the_end_or_over_the_limit(given: LoadRange, limit: float, expected: list[float]) -> None:
    assert levels(LinearSearch(given), limit) == expected


def test_a_list_ends_at_its_end_or_over_the_limit() -> None:
    assert levels(ListSearch([1, 4, 16])) == [1, 4, 16]
    assert levels(ListSearch([1, 4, 16]), 3) == [1, 4]


@pytest.mark.parametrize(
    ("limit", "expected"), [(100, [1, 16]), (0, [1]), (5, [1, 16, 8, 4, 6, 5]), (11, [1, 16, 8, 12, 10, 11])]
)
def test_binary_search_closes_in_on_the_limit(limit: float, expected: list[float]) -> None:
    assert levels(BinarySearch(LoadRange(1, 16, 1), is_whole=True), limit) == expected


def test_binary_search_needs_both_ends() -> None:
    with pytest.raises(InvalidArgumentError, match="start and an end"):
        BinarySearch(LoadRange(1), is_whole=True)

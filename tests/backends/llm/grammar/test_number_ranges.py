"""Numbers between bounds: exactly those, by comparing every candidate."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest
from modelserver_backends.llm.grammar.automaton import Automaton
from modelserver_backends.llm.grammar.expression import Expression
from modelserver_backends.llm.grammar.number_ranges import INTEGER, NUMBER, integers, numbers
from support.grammars import automaton_of, is_match

from modelserver.errors import InvalidArgumentError

_CANDIDATES = [
    sign + whole + fraction
    for sign in ("", "-")
    for whole in ("0", "1", "2", "3", "9", "10", "12")
    for fraction in ("", ".0", ".00", ".1", ".15", ".2", ".249", ".25", ".251", ".3", ".9", ".05", ".001")
    if not (sign and whole == "0" and Decimal(f"0{fraction}") == 0)
]
_BOUNDS = [None, *map(Decimal, ("-12", "-3.25", "-1", "-0.2", "0", "0.05", "0.25", "1", "1.25", "3.2", "12"))]


def _automaton(expression: Expression) -> Automaton | None:
    """None: nothing matches."""
    try:
        return automaton_of(expression)
    except InvalidArgumentError:
        return None


@pytest.mark.parametrize(("is_low_open", "is_high_open"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("low", _BOUNDS)
def test_numbers(low: Decimal | None, is_low_open: bool, is_high_open: bool) -> None:
    for high in _BOUNDS:
        if low is None and high is None:
            continue
        automaton = _automaton(numbers(low, high, is_low_open=is_low_open, is_high_open=is_high_open))
        for text in _CANDIDATES:
            value = Decimal(text)
            is_above = low is None or value > low or (value == low and not is_low_open)
            is_below = high is None or value < high or (value == high and not is_high_open)
            assert (automaton is not None and is_match(automaton, text)) == (is_above and is_below), (high, text)


@pytest.mark.parametrize("low", [-120, -10, -9, -1, 0, 1, 5, 10, 99, None])
def test_integers(low: int | None) -> None:
    for high in (-110, -10, -2, 0, 3, 10, 101, 1234, None):
        automaton = _automaton(integers(low, high))
        for value in [*range(-130, 130), 1233, 1234, 1235, 99999]:
            expected = (low is None or value >= low) and (high is None or value <= high)
            assert (automaton is not None and is_match(automaton, str(value))) == expected, (high, value)


@pytest.mark.parametrize(
    ("text", "is_number"),
    [
        ("0", True),
        ("-0", True),
        ("10.50", True),
        ("1e9", True),
        ("-2.5E-10", True),
        ("01", False),
        ("1.", False),
        (".5", False),
        ("+1", False),
        ("1e999", False),
    ],
)
def test_any_number(text: str, is_number: bool) -> None:
    assert is_match(automaton_of(NUMBER), text) == is_number
    assert is_match(automaton_of(INTEGER), text) == (is_number and text.lstrip("-").isdecimal())

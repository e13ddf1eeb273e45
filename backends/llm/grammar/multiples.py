"""Whole numbers that a whole number divides, written in digits: long division, as expressions and rules."""

from __future__ import annotations

from collections.abc import Callable

from .expression import EMPTY, NEVER, Characters, Expression, Ref, choice, concat, literal, normalized

# So many are listed one by one.
_MAX_LISTED = 1000
# Of factors whose multiples have no bound: there is a rule for each remainder and number of digits.
_MAX_FACTOR = 100
_MAX_DIGITS = 15


def multiples(
    factor: int, low: int | None, high: int | None, add_rule: Callable[[str, Expression], None]
) -> Expression | None:
    """Multiples of `factor` from `low` to `high`, both included; None: no bound. None if we cannot say it."""
    first = None if low is None else -(-low // factor)
    last = None if high is None else high // factor
    if first is not None and last is not None:
        return _listed(factor, first, last)
    if factor > _MAX_FACTOR:
        return None
    anything = _unbounded(factor, add_rule)
    below = _side(first, last, lambda start, end: _listed(factor, start, end), concat(literal("-"), anything))
    above = _side(
        None if last is None else -last,
        None if first is None else -first,
        lambda start, end: _listed(factor, -end, -start),
        anything,
    )
    if below is None or above is None:
        return None
    has_zero = (first is None or first <= 0) and (last is None or last >= 0)
    return choice([below, above, literal("0") if has_zero else NEVER])


def _side(
    first: int | None, last: int | None, listed: Callable[[int, int], Expression | None], anything: Expression
) -> Expression | None:
    """Those below zero, of the multiples number `first` to `last`."""
    if first is not None:
        return listed(first, min(-1, -1 if last is None else last))
    return anything if last is None or last >= -1 else None


def _listed(factor: int, first: int, last: int) -> Expression | None:
    if last - first >= _MAX_LISTED:
        return None
    return choice(literal(str(number * factor)) for number in range(first, last + 1))


def _unbounded(factor: int, add_rule: Callable[[str, Expression], None]) -> Expression:
    """All from `factor` on, of at most so many digits."""
    for length in range(_MAX_DIGITS):
        for remainder in range(factor):
            add_rule(_name(factor, length, remainder), _rest(factor, length, remainder))
    return _digits(factor, _MAX_DIGITS - 1, 0, 1)


def _rest(factor: int, length: int, remainder: int) -> Expression:
    """What may follow digits that leave `remainder`: up to `length` more, after which nothing remains."""
    more = _digits(factor, length - 1, remainder, 0) if length else NEVER
    return choice([more, NEVER if remainder else EMPTY])


def _digits(factor: int, length: int, remainder: int, least: int) -> Expression:
    """A digit, not below `least`, and what may follow it, up to `length` more."""
    after: dict[int, list[tuple[int, int]]] = {}
    for digit in range(least, 10):
        after.setdefault((remainder * 10 + digit) % factor, []).append((0x30 + digit, 0x30 + digit))
    return choice(
        concat(Characters(normalized(ranges)), Ref(_name(factor, length, following)))
        for following, ranges in after.items()
    )


def _name(factor: int, length: int, remainder: int) -> str:
    return f"multiple of {factor}, {length} digits, {remainder} left"

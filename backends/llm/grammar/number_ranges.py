"""Decimal numbers between two bounds, written in digits, as expressions.

Whole parts have at most 18 digits and parts after the point at most 17, so that 64-bit integers and floats hold what is
written; with bounds a number has no exponent.
"""

from __future__ import annotations

import math
from decimal import Decimal

from .expression import EMPTY, NEVER, Characters, Expression, Repeat, choice, concat, literal, optional

_MAX_WHOLE_DIGITS = 18
_MAX_FRACTION_DIGITS = 17
# Digits that a number may have beyond those of a bound that it shares its first digits with.
_NUM_FREE_DIGITS = 6
LARGEST_WHOLE = 10**_MAX_WHOLE_DIGITS - 1


def _digit(low: int, high: int) -> Expression:
    return Characters(((0x30 + low, 0x30 + high),)) if low <= high else NEVER


_ANY = _digit(0, 9)


def _digits(least: int, most: int) -> Expression:
    return Repeat(_ANY, least, most)


UNSIGNED: Expression = choice([literal("0"), concat(_digit(1, 9), _digits(0, _MAX_WHOLE_DIGITS - 1))])
INTEGER: Expression = concat(optional(literal("-")), UNSIGNED)
_EXPONENT = concat(
    Characters(((0x45, 0x45), (0x65, 0x65))), optional(Characters(((0x2B, 0x2B), (0x2D, 0x2D)))), _digits(1, 2)
)
NUMBER: Expression = concat(
    INTEGER, optional(concat(literal("."), _digits(1, _MAX_FRACTION_DIGITS))), optional(_EXPONENT)
)


def integers(low: int | None, high: int | None) -> Expression:
    """All integers from `low` to `high`, both included; None: no bound."""
    least = max(-LARGEST_WHOLE, low if low is not None else -LARGEST_WHOLE)
    most = min(LARGEST_WHOLE, high if high is not None else LARGEST_WHOLE)
    if low is None and high is None:
        return INTEGER
    negative = concat(literal("-"), _whole(max(1, -most), -least)) if least < 0 else NEVER
    return choice([negative, _whole(max(0, least), most)])


def _whole(low: int, high: int) -> Expression:
    """Whole numbers, neither below 0, without leading zeros."""
    options = []
    length = len(str(low))
    while low <= high:
        last = min(high, 10**length - 1)
        options.append(_same_length(str(low), str(last)))
        low, length = last + 1, length + 1
    return choice(options)


def _same_length(low: str, high: str) -> Expression:
    """All strings of digits from `low` to `high`, which are equally long."""
    if not low:
        return EMPTY
    if low[0] == high[0]:
        return concat(literal(low[0]), _same_length(low[1:], high[1:]))
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    options = []
    if low[1:] != "0" * rest:
        options.append(concat(literal(low[0]), _same_length(low[1:], "9" * rest)))
        first += 1
    if high[1:] != "9" * rest:
        options.append(concat(literal(high[0]), _same_length("0" * rest, high[1:])))
        last -= 1
    options.append(concat(_digit(first, last), _digits(rest, rest)))
    return choice(options)


def numbers(
    low: Decimal | None, high: Decimal | None, *, is_low_open: bool = False, is_high_open: bool = False
) -> Expression:
    """Numbers between two bounds, which belong to them unless open; None: no bound."""
    if low is None and high is None:
        return NUMBER
    limit = Decimal(LARGEST_WHOLE)
    if low is None or low < -limit:
        low, is_low_open = -limit, False
    if high is None or high > limit:
        high, is_high_open = limit, False
    options = []
    if high > 0 or (high == 0 and not is_high_open):
        least, is_open = (low, is_low_open) if low >= 0 else (Decimal(0), False)
        options.append(_positive(least, high, is_open, is_high_open))
    if low < 0:
        # Above minus zero: zero is written without a sign.
        most, is_open = (-high, is_high_open) if high < 0 else (Decimal(0), True)
        options.append(concat(literal("-"), _positive(most, -low, is_open, is_low_open)))
    return choice(options)


def _positive(low: Decimal, high: Decimal, is_low_open: bool, is_high_open: bool) -> Expression:
    """Numbers from `low` to `high`, neither below 0: those with a bound's whole part, and those between."""
    if low > high:
        return NEVER
    first, last = math.floor(low), math.floor(high)
    above, below = _fraction_digits(low), _fraction_digits(high)
    if first == last:
        return concat(literal(str(first)), _fraction(above, is_low_open, below, is_high_open))
    options = [
        concat(literal(str(first)), _fraction(above, is_low_open, None, False)),
        concat(literal(str(last)), _fraction(None, False, below, is_high_open)),
    ]
    if first + 1 < last:
        options.append(concat(_whole(first + 1, last - 1), _fraction(None, False, None, False)))
    return choice(options)


def _fraction_digits(value: Decimal) -> str:
    """What is after the point, without zeros at the end."""
    return f"{value - math.floor(value):f}".partition(".")[2].rstrip("0")


def _fraction(low: str | None, is_low_open: bool, high: str | None, is_high_open: bool) -> Expression:
    """What may follow a whole number so that its fraction is between two strings of digits: "" or "." and digits."""
    if low is None and high is None:
        return optional(concat(literal("."), _digits(1, _MAX_FRACTION_DIGITS)))
    has_none = (low is None or (low == "" and not is_low_open)) and (high != "" or not is_high_open)
    some = concat(literal("."), _first_and_more(low, is_low_open, high, is_high_open))
    return choice([EMPTY, some]) if has_none else some


def _more_digits(low: str | None, is_low_open: bool, high: str | None, is_high_open: bool) -> Expression:
    """The rest of a fraction, if what is before it is that of both bounds: `low` and `high` are their other digits.

    None: this bound is kept whatever follows. Where a bound has no digit left its digits are zeros, and ending is as
    if zeros followed.
    """
    if low == "" and not is_low_open:
        low = None
    if high == "":
        return NEVER if is_high_open or low is not None else _zeros()
    if low is None and high is None:
        return _digits(0, _NUM_FREE_DIGITS)
    if low == "" and high is None:
        return concat(_zeros(), _digit(1, 9), _digits(0, _NUM_FREE_DIGITS))
    more = _first_and_more(low, is_low_open, high, is_high_open)
    return choice([EMPTY, more]) if low is None else more


def _first_and_more(low: str | None, is_low_open: bool, high: str | None, is_high_open: bool) -> Expression:
    """The same with at least one digit."""
    low_digit = 0 if low is None else int(low[:1] or 0)
    high_digit = 9 if high is None else int(high[:1] or 0)
    low_rest = None if low is None else low[1:]
    high_rest = None if high is None else high[1:]
    options = []
    if low_digit == high_digit:
        rest = _more_digits(low_rest, is_low_open, high_rest, is_high_open)
        return concat(_digit(low_digit, low_digit), rest)
    first, last = low_digit, high_digit
    if low is not None:
        rest = _more_digits(low_rest, is_low_open, None, False)
        options.append(concat(_digit(low_digit, low_digit), rest))
        first += 1
    if high is not None:
        rest = _more_digits(None, False, high_rest, is_high_open)
        options.append(concat(_digit(high_digit, high_digit), rest))
        last -= 1
    options.append(concat(_digit(first, last), _digits(0, _NUM_FREE_DIGITS)))
    return choice(options)


def _zeros() -> Expression:
    return Repeat(_digit(0, 0), 0, _NUM_FREE_DIGITS)

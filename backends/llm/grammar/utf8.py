"""Ranges of characters as sequences of ranges of bytes."""

from __future__ import annotations

from collections.abc import Iterator

# The last character that is written with so many bytes.
_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)

ByteRanges = tuple[tuple[int, int], ...]


def byte_sequences(low: int, high: int) -> Iterator[ByteRanges]:
    """Every character from `low` to `high` (no surrogates among them) as one of these sequences, and nothing else."""
    start = low
    for last in _LAST_OF_LENGTH:
        if start <= min(high, last):
            yield from _of_one_length(chr(start).encode(), chr(min(high, last)).encode())
        start = max(start, last + 1)


def _of_one_length(low: bytes, high: bytes) -> Iterator[ByteRanges]:
    """The same for two characters that are written with equally many bytes."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    if low[0] == high[0]:
        for rest in _of_one_length(low[1:], high[1:]):
            yield ((low[0], low[0]), *rest)
        return
    first, last = low[0], high[0]
    lowest, highest = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    if low[1:] != lowest:
        for rest in _of_one_length(low[1:], highest):
            yield ((first, first), *rest)
        first += 1
    if high[1:] != highest:
        for rest in _of_one_length(lowest, high[1:]):
            yield ((last, last), *rest)
        last -= 1
    if first <= last:
        yield ((first, last), *([(0x80, 0xBF)] * (len(low) - 1)))

"""Which of the texts that wait are computed together. Pure: lengths in, positions out."""

from __future__ import annotations

from collections.abc import Sequence

# Texts up to this length share a batch however they differ: there it is the call that costs, not the padding.
_SHORT_LEN = 32


def plan_batch(lengths: Sequence[int], *, max_tokens: int, max_rows: int) -> list[int]:
    """The positions in `lengths`, which is in order of arrival, of the next batch; the first is always among them.

    Rows are padded to the longest, so those of like length are taken: none is shorter than half of the longest (unless
    all are short), and rows times the longest is at most `max_tokens`, unless there is one row only. The nearest in
    length are taken first, and of equal ones those that came first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    start = order.index(0)
    end = start + 1  # of the part of `order` that is taken
    has_below, has_above = start > 0, end < len(order)
    while (has_below or has_above) and end - start < max_rows:
        below = lengths[0] - lengths[order[start - 1]] if has_below else None
        above = lengths[order[end]] - lengths[0] if has_above else None
        goes_up = below is None or (above is not None and above <= below)
        low, high = (start, end + 1) if goes_up else (start - 1, end)
        shortest, longest = lengths[order[low]], lengths[order[high - 1]]
        if longest > max(2 * shortest, _SHORT_LEN) or (high - low) * longest > max_tokens:
            # Nor would it fit later, when more are taken.
            has_below, has_above = has_below and goes_up, has_above and not goes_up
            continue
        start, end = low, high
        has_below, has_above = has_below and start > 0, has_above and end < len(order)
    return order[start:end]

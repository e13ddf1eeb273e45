"""A comparison as rows of tables, and as JSON."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.toolkit.comparison import Comparison, Difference, Parity

Row = tuple[str, ...]


def summary_rows(comparison: Comparison) -> list[Row]:
    """Rows of (what, before, after, change)."""
    latencies = [
        ratio_row(f"latency, {one.rows} row{'s' if one.rows > 1 else ''}", one.before_ms, one.after_ms, ms_text)
        for one in comparison.latencies
    ]
    size = ratio_row("size", comparison.before_bytes, comparison.after_bytes, bytes_text)
    return [size, *latencies, *accuracy_rows(comparison)]


def accuracy_rows(parity: Parity) -> list[Row]:
    """The row of accuracy, if there were labels."""
    before, after = parity.accuracy_before, parity.accuracy_after
    if before is None or after is None:
        return []
    name = f"accuracy, {parity.num_samples} sample{'s' if parity.num_samples > 1 else ''}"
    return [(name, f"{before:.2%}", f"{after:.2%}", f"{(after - before) * 100:+.2f} points")]


def difference_rows(parity: Parity) -> list[Row]:
    """Rows of (output, max abs, max rel, mean abs, agreement)."""
    return [
        (one.output, f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.mean_abs:.3g}", f"{one.agreement:.2%}")
        for one in parity.differences
    ]


def ratio_row(what: str, before: float, after: float, text: Callable[[float], str]) -> Row:
    """A row of (what, before, after, change in percent)."""
    change = f"{(after / before - 1) * 100:+.1f} %" if before else ""
    return (what, text(before), text(after), change)


def bytes_text(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def ms_text(milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms" if milliseconds < 10 else f"{milliseconds:.1f} ms"


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON."""
    return {
        "size_bytes": {"before": comparison.before_bytes, "after": comparison.after_bytes},
        "latency_ms": [
            {"rows": one.rows, "before": one.before_ms, "after": one.after_ms} for one in comparison.latencies
        ],
        **parity_document(comparison),
    }


def parity_document(parity: Parity) -> dict[str, object]:
    """How answers agree, as JSON."""
    return {
        "accuracy": None
        if parity.accuracy_before is None
        else {"before": parity.accuracy_before, "after": parity.accuracy_after},
        "num_samples": parity.num_samples,
        "outputs": [_document(difference) for difference in parity.differences],
    }


def _document(difference: Difference) -> dict[str, object]:
    return {
        "name": difference.output,
        "max_abs": difference.max_abs,
        "max_rel": difference.max_rel,
        "mean_abs": difference.mean_abs,
        "agreement": difference.agreement,
    }

"""A comparison as rows of tables, and as JSON."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.toolkit.comparison import Comparison, Difference

Row = tuple[str, ...]


def summary_rows(comparison: Comparison) -> list[Row]:
    """Rows of (what, before, after, change)."""
    rows = [_ratio_row("size", comparison.before_bytes, comparison.after_bytes, _bytes_text)]
    rows += [
        _ratio_row(f"latency, {one.rows} row{'s' if one.rows > 1 else ''}", one.before_ms, one.after_ms, _ms_text)
        for one in comparison.latencies
    ]
    if comparison.accuracy_before is not None and comparison.accuracy_after is not None:
        change = (comparison.accuracy_after - comparison.accuracy_before) * 100
        rows.append(
            (
                f"accuracy, {comparison.num_samples} samples",
                f"{comparison.accuracy_before:.2%}",
                f"{comparison.accuracy_after:.2%}",
                f"{change:+.2f} points",
            )
        )
    return rows


def difference_rows(comparison: Comparison) -> list[Row]:
    """Rows of (output, max abs, max rel, mean abs, agreement)."""
    return [
        (one.output, f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.mean_abs:.3g}", f"{one.agreement:.2%}")
        for one in comparison.differences
    ]


def _ratio_row(what: str, before: float, after: float, text: Callable[[float], str]) -> Row:
    change = f"{(after / before - 1) * 100:+.1f} %" if before else ""
    return (what, text(before), text(after), change)


def _bytes_text(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def _ms_text(milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms" if milliseconds < 10 else f"{milliseconds:.1f} ms"


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON."""
    return {
        "size_bytes": {"before": comparison.before_bytes, "after": comparison.after_bytes},
        "latency_ms": [
            {"rows": one.rows, "before": one.before_ms, "after": one.after_ms} for one in comparison.latencies
        ],
        "accuracy": None
        if comparison.accuracy_before is None
        else {"before": comparison.accuracy_before, "after": comparison.accuracy_after},
        "num_samples": comparison.num_samples,
        "outputs": [_document(difference) for difference in comparison.differences],
    }


def _document(difference: Difference) -> dict[str, object]:
    return {
        "name": difference.output,
        "max_abs": difference.max_abs,
        "max_rel": difference.max_rel,
        "mean_abs": difference.mean_abs,
        "agreement": difference.agreement,
    }

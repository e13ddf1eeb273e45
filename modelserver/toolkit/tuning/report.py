"""The result of tuning: rows of tables, a page, JSON, and the winning config.pbtxt."""

from __future__ import annotations

import time
from collections.abc import Iterator

from modelserver.bench import charts, page
from modelserver.bench.charts import Point, Series
from modelserver.config.pbtxt import config_text
from modelserver.toolkit.comparison import (
    Row,
    accuracy_rows,
    bytes_text,
    difference_rows,
    ms_text,
    parity_document,
    ratio_row,
)
from modelserver.toolkit.tuning.session import TuneResult
from modelserver.toolkit.tuning.space import MIN_GAIN, Candidate, changes
from modelserver.toolkit.tuning.trial import Trial, TunePoint, ranked


def before_after_rows(result: TuneResult) -> list[Row]:
    """Rows of (what, before, after, change); none where nothing could be measured."""
    base, best = result.baseline, result.winner
    if base is None or best is None or base.best is None or best.best is None:
        return []
    rows: list[Row] = []
    if result.num_bytes is not None:
        # The files are those of before: what changes is how they are executed.
        rows.append(ratio_row("size", result.num_bytes, result.num_bytes, bytes_text))
    rows.append(ratio_row("inferences/s", base.best.throughput, best.best.throughput, "{:,.0f}".format))
    for before, after in _levels(result):
        name = f"{latency_name(result)}, {before.concurrency} in flight"
        rows.append(ratio_row(name, before.latency_us / 1e3, after.latency_us / 1e3, ms_text))
    if result.parity is not None:
        rows += accuracy_rows(result.parity)
    return rows


def latency_name(result: TuneResult) -> str:
    """Which latency is judged, in words."""
    percentile = result.options.percentile
    return "mean latency" if percentile is None else f"p{percentile:g} latency"


def _levels(result: TuneResult) -> Iterator[tuple[TunePoint, TunePoint]]:
    """The points of the levels of load that were measured both before and after."""
    if result.baseline is None or result.winner is None:
        return
    after = {point.concurrency: point for point in result.winner.points}
    for point in result.baseline.points:
        if point.concurrency in after and not point.num_failures and not after[point.concurrency].num_failures:
            yield point, after[point.concurrency]


def before_after_document(result: TuneResult) -> dict[str, object]:
    """The same as JSON; without answers the reason why they were not compared."""
    size = result.num_bytes
    return {
        "size_bytes": None if size is None else {"before": size, "after": size},
        "latency_ms": [
            {"concurrency": before.concurrency, "before": before.latency_us / 1e3, "after": after.latency_us / 1e3}
            for before, after in _levels(result)
        ],
        **({"not_compared": result.not_compared} if result.parity is None else parity_document(result.parity)),
    }


# The number of colours on the page.
NUM_CURVES = 6

BEFORE_AFTER_COLUMNS = ("", "before", "after", "change")
ANSWER_COLUMNS = ("output", "max abs", "max rel", "mean abs", "same answer")
COLUMNS = ("rank", "instances", "batch", "delay (us)", "threads", "infer/s", "gain", "at", "p50 (ms)", "p99 (ms)", "")


def rank_rows(result: TuneResult) -> list[tuple[str, ...]]:
    """The ranked table, best first."""
    rows: list[tuple[str, ...]] = []
    best, base = result.winner, result.baseline
    above = above_best(result)
    for number, trial in enumerate(ranked(result.trials), 1):
        knobs = _knobs(trial.candidate)
        if trial.best is None:
            rows.append((str(number), *knobs, "", "", "", "", "", trial.error))
            continue
        point = trial.best
        rows.append(
            (
                str(number),
                *knobs,
                f"{point.throughput:,.0f}",
                _gain(trial, base),
                str(point.concurrency),
                f"{point.p50_us / 1e3:.2f}",
                f"{point.p99_us / 1e3:.2f}",
                _remark(trial, best, result, is_above=number <= len(above)),
            )
        )
    return rows


def _knobs(candidate: Candidate) -> tuple[str, str, str, str]:
    return (
        str(candidate.num_instances),
        str(candidate.max_batch_size) if candidate.delay_us is not None else "off",
        "" if candidate.delay_us is None else str(candidate.delay_us),
        "" if candidate.num_threads is None else str(candidate.num_threads or "default"),
    )


def _gain(trial: Trial, base: Trial | None) -> str:
    if base is None or base.best is None or trial.best is None or trial is base:
        return ""
    return f"{(trial.best.throughput / base.best.throughput - 1) * 100:+.0f} %"


def above_best(result: TuneResult) -> list[Trial]:
    """The trials that rank above the best one: better than it, but by less than what may be chance."""
    trials, best = ranked(result.trials), result.winner
    return trials[: trials.index(best)] if best is not None else []


def _remark(trial: Trial, best: Trial | None, result: TuneResult, *, is_above: bool) -> str:
    words = []
    if trial is best:
        words.append("best")
    if is_above:
        words.append(f"less than {MIN_GAIN:.0%} better")
    if trial.candidate == result.space.start:
        words.append("as it was")
    if trial.score is not None and not trial.score.is_within:
        words.append("too slow")
    if trial.best is not None and not trial.best.is_stable:
        words.append("unsteady")
    return ", ".join(words)


def target_text(result: TuneResult) -> str:
    """The target, in words."""
    options = result.options
    if not options.limit_us:
        return "the most inferences per second"
    what = "mean latency" if options.percentile is None else f"p{options.percentile:g}"
    return f"the most inferences per second with {what} up to {options.limit_us / 1e3:g} ms"


def notes(result: TuneResult) -> list[str]:
    """Notes for the reader: knobs that were not tuned, an early end, requests that will be refused."""
    found = [*result.space.notes, *([result.end] if result.end else [])]
    best = result.winner
    if above_best(result):
        found.append(
            f"a setting must be {MIN_GAIN:.0%} better to replace another, because less may be chance: the settings "
            "ranked above the best one are not"
        )
    if result.not_compared and best is not None:
        found.append(f"the answers before and after were not compared: {result.not_compared}")
    if best is not None and best.candidate.max_batch_size < result.config.max_batch_size:
        found.append(
            f"with the best setting requests of more than {best.candidate.max_batch_size} rows are refused "
            f"(until now: of more than {result.config.max_batch_size}); --batch-sizes says which to try"
        )
    return found


def winning_text(result: TuneResult) -> str:
    """The config.pbtxt of the winner. Raises ConfigError."""
    best = result.winner
    config = result.winning_config
    assert best is not None, "there is a config where there is a winner"
    assert config is not None, "there is a config where there is a winner"
    assert best.best is not None, "a winner was measured"
    point = best.best
    comment = (
        f"Found by modelserver tune: {best.candidate}.\n"
        f"{point.throughput:,.0f} inferences/s, p99 {point.p99_us / 1e3:.2f} ms, {point.concurrency} in flight."
    )
    return config_text(config, comments=(comment,))


def tune_document(result: TuneResult) -> dict[str, object]:
    """The result as JSON."""
    best = result.winner
    return {
        "model": result.options.model,
        "target": target_text(result),
        "end": result.end or "the search ended",
        "seconds": result.seconds,
        "notes": notes(result),
        "winner": _candidate_document(best.candidate) if best is not None else None,
        "before_after": before_after_document(result) if best is not None else None,
        "trials": [_trial_document(trial) for trial in ranked(result.trials)],
    }


def _candidate_document(candidate: Candidate) -> dict[str, object]:
    return {
        "instances": candidate.num_instances,
        "max_batch_size": candidate.max_batch_size,
        "delay_us": candidate.delay_us,
        "threads": candidate.num_threads,
    }


def _trial_document(trial: Trial) -> dict[str, object]:
    return {
        **_candidate_document(trial.candidate),
        "is_within": trial.score.is_within if trial.score is not None else False,
        "error": trial.error,
        "levels": [
            {
                "concurrency": point.concurrency,
                "throughput": point.throughput,
                "latency_us": point.latency_us,
                "p50_us": point.p50_us,
                "p99_us": point.p99_us,
                "failures": point.num_failures,
                "is_best": point is trial.best,
            }
            for point in trial.points
        ],
    }


def html_report(result: TuneResult) -> str:
    """A self-contained page: the winner, curves, every trial, the config."""
    options = result.options
    subtitle = f"{target_text(result)}; {len(result.trials)} settings in {result.seconds:.0f} s, {_date()}"
    sections = [_glance(result), _before_after(result), _curves(result), _gains(result)]
    sections.append(page.section("All settings", page.table(COLUMNS, rank_rows(result))))
    if result.winner is not None:
        sections.append(page.section("config.pbtxt", f"<pre>{_escaped(winning_text(result))}</pre>"))
    return page.page(f"Tuning of {options.model}", subtitle, [section for section in sections if section])


def _date() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def _escaped(text: str) -> str:
    from html import escape

    return escape(text)


def _glance(result: TuneResult) -> str:
    best, base = result.winner, result.baseline
    if best is None or best.best is None:
        return page.section("At a glance", page.warning("No setting could be measured."))
    entries = [("inferences/s at best", charts.short(best.best.throughput))]
    if base is not None and base.best is not None:
        entries.append(("inferences/s as it was", charts.short(base.best.throughput)))
        entries.append(("gain", _gain(best, base) or "none"))
    entries.append(("p99 at best (ms)", f"{best.best.p99_us / 1e3:.2f}"))
    rows = changes(result.space.start, best.candidate)
    parts = [page.facts(entries)]
    if rows:
        parts.append(page.table(("knob", "before", "best"), rows))
    else:
        parts.append('<p class="note">Nothing was better than the model as it was.</p>')
    parts += [f'<p class="note">{_escaped(note)}</p>' for note in notes(result)]
    return page.section("At a glance", *parts)


def _before_after(result: TuneResult) -> str:
    rows = before_after_rows(result)
    if not rows:
        return ""
    answers = page.table(ANSWER_COLUMNS, difference_rows(result.parity)) if result.parity is not None else ""
    return page.section("Before and after", page.table(BEFORE_AFTER_COLUMNS, rows), answers)


def _curves(result: TuneResult) -> str:
    """Latency against throughput of the best settings, and of the model as it was."""
    shown = [trial for trial in ranked(result.trials) if trial.points and trial.best is not None][: NUM_CURVES - 1]
    base = result.baseline
    if base is not None and base.points and base not in shown:
        shown.append(base)
    if not shown:
        return ""
    series = [Series(_name(trial, result), color, _points(trial)) for color, trial in enumerate(shown)]
    by_load = [
        Series(
            _name(trial, result),
            color,
            [
                Point(p.concurrency, p.throughput, f"{p.concurrency}: {charts.short(p.throughput)}/s")
                for p in trial.points
            ],
        )
        for color, trial in enumerate(shown)
    ]
    return page.section(
        "The best settings",
        page.pair(
            (
                "p99 against throughput",
                charts.line_chart(series, title="Latency", x_name="inferences/s", y_name="p99 (us)"),
            ),
            (
                "Throughput against load",
                charts.line_chart(by_load, title="Throughput", x_name="requests in flight", y_name="inferences/s"),
            ),
        ),
    )


def _points(trial: Trial) -> list[Point]:
    return [
        Point(p.throughput, p.p99_us, f"{p.concurrency} in flight: {charts.short(p.throughput)}/s", str(p.concurrency))
        for p in trial.points
    ]


def _name(trial: Trial, result: TuneResult) -> str:
    return f"{trial.candidate}{' (as it was)' if trial.candidate == result.space.start else ''}"


def _gains(result: TuneResult) -> str:
    rows = [
        (str(trial.candidate), [charts.Part("inferences/s", 2, trial.best.throughput)])
        for trial in ranked(result.trials)
        if trial.best is not None
    ][:24]
    return page.section("Throughput", charts.stacked_bars(rows, title="Throughput", unit="/s")) if rows else ""

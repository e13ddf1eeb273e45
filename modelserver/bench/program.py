"""The bench as a program: words in, reports out, an exit status."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from modelserver.bench.arguments import make_parser, parse_arguments, wants_help
from modelserver.bench.options import BenchOptions
from modelserver.bench.progress import ProgressBar
from modelserver.bench.report_csv import write_csv
from modelserver.bench.report_export import write_export
from modelserver.bench.report_json import write_json
from modelserver.bench.report_text import TextReport
from modelserver.bench.results import Results
from modelserver.bench.session import run_bench


def run(words: Sequence[str]) -> int:
    """Measure what the words say; 0 if all requests succeeded, else 1. Raises InvalidArgumentError and ServerError."""
    if wants_help(words):
        sys.stdout.write(make_parser().format_help())
        return 0
    options = parse_arguments(words)
    # Where the JSON goes to standard output, people read on the other one.
    out = sys.stderr if options.report.json_file == "-" else sys.stdout
    bar = ProgressBar(sys.stderr)
    report = TextReport(options, out, bar)
    report.begin()
    try:
        results = asyncio.run(run_bench(options, report))
    except KeyboardInterrupt:
        bar.close()
        sys.stderr.write("interrupted: nothing is reported\n")
        return 1
    finally:
        bar.clear()
    report.end(results)
    _write_files(options, results)
    return 0 if results.is_good else 1


def _write_files(options: BenchOptions, results: Results) -> None:
    report = options.report
    if report.csv_file is not None:
        write_csv(results, report.csv_file)
    if report.export_file is not None:
        write_export(results, report.export_file)
    if report.json_file:
        write_json(results, report.json_file)

"""The bench as a program: words in, reports out, an exit status."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TextIO

from modelserver.bench.arguments import parse_arguments, wants_help, wants_version
from modelserver.bench.flags import make_parser
from modelserver.bench.llm.options import LlmOptions
from modelserver.bench.llm.report import LlmTextReport, html_llm_report, llm_document
from modelserver.bench.llm.results import LlmResults
from modelserver.bench.llm.session import run_llm
from modelserver.bench.options import BenchOptions, ReportOptions
from modelserver.bench.report_files import results_document, write_csv, write_document, write_export, write_file
from modelserver.bench.report_html import html_report
from modelserver.bench.report_text import ProgressBar, TextReport
from modelserver.bench.results import Results
from modelserver.bench.session import run_bench


def run(words: Sequence[str]) -> int:
    """Measure what the words say; 0 if all requests succeeded, else 1. Raises InvalidArgumentError and ServerError."""
    if wants_help(words):
        sys.stdout.write(make_parser().format_help())
        return 0
    if wants_version(words):
        sys.stdout.write(f"modelserver {metadata.version('modelserver-py')}\n")
        return 0
    options = parse_arguments(words)
    # Where the JSON goes to standard output, people read on the other one.
    out = sys.stderr if options.report.json_file == "-" else sys.stdout
    bar = ProgressBar(sys.stderr)
    try:
        if isinstance(options, LlmOptions):
            return _run_llm(options, out, bar)
        return _run_tensors(options, out, bar)
    except KeyboardInterrupt:
        bar.clear()
        sys.stderr.write("interrupted: nothing is reported\n")
        return 1
    finally:
        bar.clear()


def _run_tensors(options: BenchOptions, out: TextIO, bar: ProgressBar) -> int:
    report = TextReport(options, out, bar)
    results = asyncio.run(run_bench(options, report))
    report.end(results)
    _write_files(options.report, results)
    return 0 if results.is_good else 1


def _write_files(report: ReportOptions, results: Results) -> None:
    if report.csv_file is not None:
        write_csv(results, report.csv_file)
    if report.export_file is not None:
        write_export(results, report.export_file)
    if report.json_file:
        write_document(results_document(results), report.json_file)
    if report.html_file is not None:
        write_file(report.html_file, html_report(results), "--html")


def _run_llm(options: LlmOptions, out: TextIO, bar: ProgressBar) -> int:
    report = LlmTextReport(options, out, bar)
    results: LlmResults = asyncio.run(run_llm(options, report))
    report.end(results)
    if options.report.json_file:
        write_document(llm_document(results), options.report.json_file)
    if options.report.html_file is not None:
        write_file(options.report.html_file, html_llm_report(results), "--html")
    return 0 if results.is_good else 1

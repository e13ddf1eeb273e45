"""`python -m benchmarks`: every speed that the project promises, measured side by side in one run.

Each case starts the servers it compares, loads them in turn for a few rounds, and prints medians: requests
per second, server CPU per request (children included), latency. The table at the end holds the ratios
against their targets. Peers (real Triton, MLServer) are installed on first use under `.bench/`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    backend_cases,
    cases,
    client_cases,
    front_cases,
    large_cases,
    python_cases,
    table_cases,
    tls_cases,
    wire_cases,
)
from benchmarks.report import Report

CASES: dict[str, Callable[[cases.Settings, Report], None]] = {
    "a": cases.http_small,
    "b": cases.grpc_small,
    "c": cases.http_json,
    "d": backend_cases.resnet,
    "e": cases.dynamic_batching,
    "f": cases.large_tensors,
    "g": python_cases.python_backend,
    "h": cases.metrics_cost,
    "i": wire_cases.grpc_identity,
    "j": wire_cases.http_identity,
    "k": wire_cases.large_identity,
    "l": wire_cases.digits_mlp,
    "m": client_cases.foreign_clients,
    "n": tls_cases.tls,
    "o": large_cases.memory_and_json,
    "p": front_cases.wire_processes,
    "q": table_cases.tables,
}


def main() -> None:
    listing = "; ".join(f"{key} {case.__doc__.splitlines()[0]}" for key, case in CASES.items() if case.__doc__)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Side-by-side benchmarks.", epilog=listing
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"which to run: {' '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=3, help="times each server is measured; medians are quoted (3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables of docs/performance.md to this file")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}, expected one of {' '.join(CASES)}")
    report = Report()
    for key in options.cases or CASES:
        with tempfile.TemporaryDirectory() as scratch:
            CASES[key](cases.Settings(Path(scratch), options.rounds, options.seconds), report)
    report.print()
    if options.markdown:
        options.markdown.write_text(report.markdown())
    if options.json:
        report.save(options.json)


if __name__ == "__main__":
    main()

"""`modelserver doctor`: checks the machine for known problems, and says how to fix them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import typer

from modelserver.backend.discovery import find_backend, list_backends
from modelserver.cli.completion import FlagCommand
from modelserver.cli.machine import machine_findings
from modelserver.cli.models import AsJson
from modelserver.cli.output import print_json, print_line, print_table
from modelserver.errors import ServerError
from modelserver.options.sources import resolve_options
from modelserver.platform.diagnosis import Finding, FindingLevel


def register(app: typer.Typer) -> None:
    app.command(cls=FlagCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check ports, limits, shared memory, devices and packages; exit code 1 if something will not work.

    Also takes the flags of `serve`, to check the ports and directories that they name.
    """
    options = resolve_options(list(context.args), os.environ).options
    findings = [*machine_findings(options), *_backend_findings(options.backend_directory)]
    if as_json:
        print_json(
            [
                {"level": each.level.value, "subject": each.subject, "found": each.found, "advice": each.advice}
                for each in findings
            ]
        )
    else:
        _print(findings)
    if any(each.level is FindingLevel.PROBLEM for each in findings):
        raise typer.Exit(1)


def _backend_findings(directories: Iterable[str]) -> list[Finding]:
    """The findings of each installed backend about this machine."""
    places = [Path(directory) for directory in directories]
    findings: list[Finding] = []
    for listing in list_backends(places):
        subject = f"backend {listing.name}"
        if listing.missing_library:
            advice = f"pip install 'modelserver[{listing.extra}]'" if listing.extra else ""
            findings.append(Finding(FindingLevel.OK, subject, f"not installed: {listing.missing_library}", advice))
            continue
        try:
            backend = find_backend(listing.name, backend_directories=places)
        except ServerError as error:
            findings.append(Finding(FindingLevel.PROBLEM, subject, error.message))
            continue
        findings.append(Finding(FindingLevel.OK, subject, f"from {listing.source}"))
        findings += backend.diagnose()
    return findings


def _print(findings: list[Finding]) -> None:
    print_table(("", "subject", "found"), [(each.level.value, each.subject, each.found) for each in findings])
    advised = [each for each in findings if each.advice]
    if advised:
        print_line("")
    for each in advised:
        print_line(f"{each.level.value}: {each.subject}: {each.advice}")
    if all(each.level is FindingLevel.OK for each in findings):
        print_line("nothing is amiss")

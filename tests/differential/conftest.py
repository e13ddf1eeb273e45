"""Both servers over one repository, and at the end the count of what was compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.differential.models import LOADED, write_repository
from support.differential.servers import ours, triton
from support.differential.tally import TALLY
from support.differential.target import Target

Pair = tuple[Target, Target]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Triton and ours, in explicit mode with the same models loaded."""
    root = tmp_path_factory.mktemp("differential")
    for name in ("triton", "ours"):
        write_repository(root / name)
    flags = (*(f"--load-model={name}" for name in LOADED), "--exit-on-error=false", "--strict-readiness=false")
    options = {"load_model": tuple(LOADED), "strict_readiness": False}
    with (
        triton(root / "triton", root / "triton.log", mode="explicit", flags=flags) as theirs,
        ours(root / "ours", mode="explicit", options=options) as own,
    ):
        yield theirs, own


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.num_cases:
        terminalreporter.section("compared with Triton")
        terminalreporter.write_line(TALLY.text())

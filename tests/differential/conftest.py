"""Both servers over one repository, and at the end the count of what was compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.differential.models import LOADED, write_repository
from support.differential.servers import ours, triton
from support.differential.tally import TALLY
from support.differential.target import Target

Pair = tuple[Target, Target]


# What the ensembles among the models that cases load are made of.
_PARTS = ("add_sub", "echo_text")


@contextmanager
def _both(root: Path, loaded: Iterable[str]) -> Iterator[Pair]:
    """Triton and ours, in explicit mode with the same models loaded."""
    for name in ("triton", "ours"):
        write_repository(root / name)
    flags = (*(f"--load-model={name}" for name in loaded), "--exit-on-error=false", "--strict-readiness=false")
    options = {"load_model": tuple(loaded), "strict_readiness": False}
    with (
        triton(root / "triton", root / "triton.log", mode="explicit", flags=flags) as theirs,
        ours(root / "ours", mode="explicit", options=options) as own,
    ):
        yield theirs, own


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with all models that load."""
    with _both(tmp_path_factory.mktemp("differential"), LOADED) as both:
        yield both


@pytest.fixture(scope="session")
def control_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with few, for cases that load and unload."""
    with _both(tmp_path_factory.mktemp("control"), _PARTS) as both:
        yield both


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.num_cases:
        terminalreporter.section("compared with Triton")
        terminalreporter.write_line(TALLY.text())

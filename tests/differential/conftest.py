"""Both servers over one repository, and at the end the count of what was compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.differential import mode_cases
from support.differential.flag_cases import FLAG_MODELS, FLAGS, TRACE_FLAGS
from support.differential.models import LOADED, Entry, write_repository
from support.differential.servers import ours, triton
from support.differential.tally import TALLY
from support.differential.target import Target

Pair = tuple[Target, Target]


# What the ensembles among the models that cases load are made of.
_PARTS = ("add_sub", "echo_text")


@contextmanager
def _both_in_mode(
    root: Path, write: Callable[[Path], Sequence[Path]], mode: str, options: Mapping[str, Any] | None = None
) -> Iterator[Pair]:
    """Both in a mode other than explicit, over repositories that `write` makes below a directory."""
    given = {"exit_on_error": False, "strict_readiness": False, **(options or {})}
    theirs_in, ours_in = write(root / "triton"), write(root / "ours")
    flags = [*_flags(given), *(f"--model-repository={path}" for path in theirs_in[1:])]
    # No value of this option is Triton's word for yes.
    flags = [flag.replace("=True", "=true").replace("=False", "=false") for flag in flags]
    with (
        triton(theirs_in[0], root / "triton.log", mode=mode, flags=tuple(flags)) as theirs,
        ours(ours_in, mode=mode, options=given) as own,
    ):
        theirs.repository, own.repository = theirs_in[0], ours_in[0]
        yield theirs, own


def _writer(*tables: Mapping[str, Entry]) -> Callable[[Path], list[Path]]:
    """Writes a repository for each table."""

    def write(root: Path) -> list[Path]:
        roots = [root / f"r{number}" for number in range(len(tables))]
        for path, table in zip(roots, tables, strict=True):
            path.mkdir(parents=True)
            for name, entry in table.items():
                entry.write(path / name)
        return roots

    return write


@contextmanager
def _both(
    root: Path, loaded: Iterable[str], options: Mapping[str, Any] | None = None, trace: tuple[str, ...] = ()
) -> Iterator[Pair]:
    """Triton and ours, in explicit mode with the same models loaded and the same options, `trace` those of tracing."""
    given = {name: dict(options or {}) for name in ("triton", "ours")}
    for name, own_options in given.items():
        write_repository(root / name)
        if trace:
            own_options["trace_config"] = (*trace, f"triton,file={root / name}.trace")
    flags = (*(f"--load-model={name}" for name in loaded), "--exit-on-error=false", "--strict-readiness=false")
    own_options = {"load_model": tuple(loaded), "strict_readiness": False, **given["ours"]}
    with (
        triton(
            root / "triton", root / "triton.log", mode="explicit", flags=(*flags, *_flags(given["triton"]))
        ) as theirs,
        ours(root / "ours", mode="explicit", options=own_options) as own,
    ):
        yield theirs, own


def _flags(options: Mapping[str, Any]) -> list[str]:
    """The options as they are written on a command line."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, values in options.items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]


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


@pytest.fixture(scope="session")
def flag_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with flags, for cases that they change."""
    root = tmp_path_factory.mktemp("flags")
    with _both(root, FLAG_MODELS, FLAGS, TRACE_FLAGS) as both:
        yield both


@pytest.fixture(scope="session")
def none_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with all of a repository that they never look at again."""
    with _both_in_mode(tmp_path_factory.mktemp("none"), _writer(mode_cases.FIXED), "none") as both:
        yield both


@pytest.fixture(scope="session")
def poll_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both look at their files each second."""
    options = {"repository_poll_secs": 1}
    with _both_in_mode(tmp_path_factory.mktemp("poll"), _writer(mode_cases.POLLED), "poll", options) as both:
        yield both


@pytest.fixture(scope="session")
def space_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with two repositories that have models of the same names."""
    write = _writer(*mode_cases.SPACES.values())
    with _both_in_mode(tmp_path_factory.mktemp("spaces"), write, "none", {"model_namespacing": True}) as both:
        yield both


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.num_cases:
        terminalreporter.section("compared with Triton")
        terminalreporter.write_line(TALLY.text())

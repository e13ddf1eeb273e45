"""`modelserver traffic`, and what other commands say of models on demand and of callers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.repositories import write_model
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import read_keys
from modelserver.auth.caller_limits import CallerLimits
from modelserver.cli.main import main

ALL = "version_policy { all { } }\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_model(root, "m", versions=(1, 2, 3), extra=ALL)
    with running_server(root, model_control_mode="explicit", load_on_demand=True) as running:
        yield running


@pytest.fixture
def run(served: RunningServer, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Run a command against the server: what it printed, after the status that it ended with."""

    def command(*words: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main((*words, f"--url=http://{served.http_url}"))
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == status, captured
        return captured.out + captured.err

    return command


def test_traffic_is_set_shown_and_removed(run) -> None:  # type: ignore[no-untyped-def]
    assert "the highest version answers" in run("traffic", "m")
    shown = run("traffic", "m", "--weight=1=3", "--weight=2=1", "--shadow=3=0.5", "--sticky-by=caller")
    assert [line.split()[:3] for line in shown.splitlines()[-4:-1]] == [
        ["1", "75", "%"],
        ["2", "25", "%"],
        ["3", "50", "%"],
    ]
    assert "caller" in shown
    document = json.loads(run("traffic", "m", "--json"))
    assert document["weights"] == {"1": 3.0, "2": 1.0}
    assert "the highest version answers" in run("traffic", "m", "--remove")


def test_what_is_wrong_is_said(run) -> None:  # type: ignore[no-untyped-def]
    assert "VERSION=NUMBER" in run("traffic", "m", "--weight=1", status=1)
    assert "--remove" in run("traffic", "m", "--weight=1=1", "--remove", status=1)
    assert "model 'none' is not in the repository" in run("traffic", "none", "--weight=1=1", status=1)


def test_a_model_on_demand_is_kept_and_evicted(run) -> None:  # type: ignore[no-untyped-def]
    run("load", "m", "--keep-alive=1h")
    assert "READY" in run("list")
    run("unload", "m", "--evict")
    assert "loaded on demand" in run("list")
    assert "1 parsec" in run("load", "m", "--keep-alive=1 parsec", status=1)


def test_a_key_has_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    with pytest.raises(SystemExit):
        main(
            ("keys", "create", "batch", "--scope=infer", "--limit=concurrent=4", "--limit=weight=0.5", f"--file={file}")
        )
    capsys.readouterr()
    (key,) = read_keys(file).values()
    assert key.limits == CallerLimits(concurrent=4, weight=0.5)

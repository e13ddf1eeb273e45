"""Tuning of real models on a real server, which gets each of them back as it was."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.digit_samples import write_digit_samples
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.bench.input_data import DataOptions
from modelserver.client.endpoint import endpoint_at
from modelserver.client.server_client import ServerClient
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError
from modelserver.toolkit.sample_files import SampleOptions
from modelserver.toolkit.tuning.report import (
    before_after_rows,
    html_report,
    notes,
    rank_rows,
    tune_document,
    winning_text,
)
from modelserver.toolkit.tuning.served_answers import borrowed
from modelserver.toolkit.tuning.session import TuneOptions, TuneResult, tune
from modelserver.toolkit.tuning.space import SpaceOptions
from modelserver.toolkit.tuning.trial import Trial

SMALL = SpaceOptions(instances=(1, 2), batch_sizes=(8,), delays_us=(0,))


class Silent:
    """A watcher that calls something when a trial begins."""

    def __init__(self, on_trial: Callable[[int], None] = lambda _: None) -> None:
        self._on_trial = on_trial

    def run_began(self, result: TuneResult) -> None:
        pass

    def trial_began(self, number: int, candidate: object) -> None:
        self._on_trial(number)

    def level_began(self, concurrency: int) -> None:
        pass

    def trial_ended(self, number: int, trial: Trial) -> None:
        pass

    def comparison_began(self) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_repository: Path) -> Iterator[RunningServer]:
    own = tmp_path_factory.mktemp("tuning")
    for name in ("slow", "idle"):
        # 4 ms whatever the batch: instances and batching are worth their factor on any machine.
        write_identity(own, name, execute_delay_ms=4, more="instance_group { count: 1 kind: KIND_CPU }")
    write_identity(own, "sequence", more="sequence_batching { }")
    with running_server(
        (own, model_repository), model_control_mode="explicit", load_model=("slow", "digits_pipeline", "sequence")
    ) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> ServerClient:
    return ServerClient(f"http://{server.http_url}")


def options(client: ServerClient, model: str = "slow", **fields) -> TuneOptions:
    defaults = {"space": SMALL, "concurrencies": (4,), "window_s": 0.1, "data": DataOptions(shapes={"INPUT0": (2,)})}
    return TuneOptions(model, **{"url": client.url, **defaults, **fields})


def test_batching_wins_and_the_model_is_given_back(client: ServerClient, tmp_path: Path) -> None:
    before = client.model_config("slow")
    result = tune(options(client), Silent())
    assert client.model_config("slow") == before
    best, base = result.winner, result.baseline
    assert best is not None
    assert base is not None
    assert best.best is not None
    assert base.best is not None
    assert best.best.throughput > 1.5 * base.best.throughput
    assert result.end == ""

    config = parse_pbtxt(winning_text(result)).config
    assert config == result.winning_config
    assert (config.name, config.dynamic_batching is not None or config.instance_group[0].count == 2) == ("slow", True)
    rows = rank_rows(result)
    assert rows[0][-1].startswith("best")
    assert any("as it was" in row[-1] for row in rows)
    page = html_report(result)
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")
    assert json.loads(json.dumps(tune_document(result)))["winner"]["instances"] in (1, 2)


@pytest.mark.slow
def test_a_target_that_nobody_meets_and_limits(client: ServerClient) -> None:
    result = tune(options(client, limit_us=1000.0, max_trials=2, is_exhaustive=True), Silent())
    assert result.end == "ended after 2 trials (--max-trials)"
    assert result.end in notes(result)
    # A machine that has no time for us may answer nothing within the windows: then there is no score.
    assert not any(trial.score is not None and trial.score.is_within for trial in result.trials)
    assert all("too slow" in row[-1] or "no answers" in row[-1] for row in rank_rows(result))
    assert tune(options(client, time_limit_s=1e-9), Silent()).trials == []


@pytest.mark.parametrize("is_grpc", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_overrides_and_unloaded_models_come_back_too(
    client: ServerClient, server: RunningServer, is_grpc: bool
) -> None:
    override = client.model_config("slow") | {"max_batch_size": 5}
    client.load("slow", {"config": json.dumps(override)})
    own = client.model_config("slow")
    quick = {"space": SpaceOptions(), "max_trials": 1, "is_grpc": is_grpc}
    if is_grpc:
        quick["url"] = server.grpc_url
    (trial,) = tune(options(client, **quick), Silent()).trials
    assert trial.best is not None
    assert trial.best.throughput > 0
    assert client.model_config("slow") == own
    client.load("slow", {"override": False})

    tune(options(client, "idle", **quick), Silent())
    (row,) = [row for row in client.index() if row["name"] == "idle"]
    assert row.get("state") != "READY"


@pytest.mark.parametrize("is_grpc", [pytest.param(False, marks=pytest.mark.slow), True])
def test_answers_before_and_after_are_compared(
    client: ServerClient, server: RunningServer, model_repository: Path, tmp_path: Path, is_grpc: bool
) -> None:
    samples = SampleOptions(write_digit_samples(tmp_path)[1])
    quick = {
        "space": SpaceOptions(instances=(2,)),
        "data": DataOptions(),
        "max_trials": 2,
        "window_s": 0.3,
        "samples": samples,
        "directory": model_repository / "digits_onnx",
        "is_grpc": is_grpc,
        "url": server.grpc_url if is_grpc else client.url,
    }
    result = tune(options(client, "digits_onnx", **quick), Silent())
    parity = result.parity
    assert parity is not None, result.not_compared
    assert parity.num_samples == 120
    assert {one.output for one in parity.differences} == {"probabilities", "digit"}
    assert all(one.agreement == 1.0 for one in parity.differences)
    assert parity.accuracy_before == parity.accuracy_after
    assert parity.accuracy_before is not None
    assert parity.accuracy_before > 0.9
    assert result.num_bytes == (model_repository / "digits_onnx/1/model.onnx").stat().st_size
    assert "accuracy, 120 samples" in [row[0] for row in before_after_rows(result)]


def test_samples_that_do_not_fit_are_refused_before_anything_is_measured(client: ServerClient, tmp_path: Path) -> None:
    before = client.model_config("slow")
    path = tmp_path / "samples.npz"

    def refused(model: str, match: str, **arrays: np.ndarray) -> None:
        np.savez(path, **arrays)
        own = options(client, model, space=SpaceOptions(), samples=SampleOptions(path))
        with pytest.raises(InvalidArgumentError, match=match):
            tune(own, Silent(lambda _: pytest.fail("measured")))

    refused("slow", "'INPUT1' is not an input of the model", INPUT1=np.zeros((3, 2)))
    refused("slow", "--label-output", INPUT0=np.zeros((3, 1), np.float32), labels=np.zeros(3, int))
    refused("sequence", "--data: answers cannot be compared: .* sequence", INPUT0=np.zeros((3, 1), np.float32))
    assert client.model_config("slow") == before


def test_answers_that_cannot_be_compared_are_a_note(client: ServerClient) -> None:
    shapes = SampleOptions(shapes={"INPUT1": (2,)})
    (trial,) = (result := tune(options(client, max_trials=1, samples=shapes), Silent())).trials
    assert trial.best is not None
    assert result.parity is None
    assert any("were not compared: --shape: the model has no input 'INPUT1'" in note for note in notes(result))


@pytest.fixture
def sigint(request: pytest.FixtureRequest) -> Iterator[None]:
    """What SIGINT does is what the test says, not what the shell of whoever runs it left."""
    old = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize(
    ("name", "sigint"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),  # in the background
    ],
    indirect=["sigint"],
)
@pytest.mark.usefixtures("sigint")
def test_signals_end_it_and_the_model_comes_back(client: ServerClient, name: signal.Signals) -> None:
    before = client.model_config("slow")

    def interrupt(number: int) -> None:
        if number == 2:
            signal.raise_signal(name)

    result = tune(options(client), Silent(interrupt))
    assert result.end == "interrupted"
    assert len(result.trials) == 1
    assert client.model_config("slow") == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_gives_the_model_back(client: ServerClient) -> None:
    before = client.model_config("slow")

    def break_(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tune(options(client), Silent(break_))
    assert client.model_config("slow") == before


def test_what_cannot_be_tuned_is_said(client: ServerClient, tmp_path: Path, model_repository: Path) -> None:
    with pytest.raises(NotFoundError, match="slo"):
        tune(options(client, "slo"), Silent())
    with pytest.raises(InvalidArgumentError, match="is an ensemble"):
        tune(options(client, "digits_pipeline"), Silent())
    with (
        pytest.raises(UnavailableError, match="connection refused"),
        borrowed(endpoint_at("localhost:1", is_grpc=False).control(), "x"),
    ):
        pass
    with (
        running_server(model_repository, model_control_mode="none", load_model=()) as fixed,
        pytest.raises(UnavailableError, match="--model-control-mode=explicit"),
    ):
        tune(options(ServerClient(f"http://{fixed.http_url}"), "identity"), Silent())

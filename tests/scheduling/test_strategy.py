from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import ModelConfig, ModelDynamicBatching
from modelserver.errors import ConfigError
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.scheduling.strategy import STRATEGY_PARAMETER, BatchStrategy, find_strategy
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock

# At most as many requests as the config's parameter says; notes what it is called with.
SOURCE = """
calls = []

def model_init(config):
    calls.append(("model_init", config["name"]))
    return int(config["parameters"]["limit"]["string_value"])

def init(limit):
    calls.append(("init", limit))
    return {"left": limit}

def include_request(request, batch):
    calls.append(("include", request.id))
    batch["left"] -= 1
    return batch["left"] >= 0

def fini(batch):
    calls.append(("fini", batch["left"]))

def model_fini(limit):
    calls.append(("model_fini", limit))
"""


def config_of(**dynamic: Any) -> ModelConfig:
    return batching_config(8, dynamic_batching=ModelDynamicBatching(**dynamic), parameters={"limit": "2"})


def written(directory: Path, source: str = SOURCE) -> Path:
    path = directory / "batchstrategy.py"
    path.write_text(source)
    return path


class Batching:
    def __init__(self, strategy: BatchStrategy, config: ModelConfig) -> None:
        self.clock = ManualClock()
        self.worker = WaitingThread()
        self.batcher = Batcher(
            config, loop=ManualLoop(self.clock), statistics=ModelStatistics(), clock=self.clock, form=strategy.form
        )

    def submit(self, *names: str, rows: int = 1) -> None:
        for name in names:
            self.batcher.submit(request(rows, id=name))

    def take(self) -> str | int | None:
        batch, wait_until_ns = self.batcher.try_take(self.worker)
        check_integrity(self.batcher)
        return " ".join(sent.id for sent in batch.requests) if batch is not None else wait_until_ns


def test_the_strategy_is_asked_of_each_request_in_turn(tmp_path: Path) -> None:
    config = config_of()
    strategy = BatchStrategy(written(tmp_path), config)
    batching = Batching(strategy, config)
    batching.submit("a", "b", "c")
    assert batching.take() == "a b"
    assert batching.take() == "c"
    assert batching.take() is None
    strategy.close()
    calls = strategy._include.__globals__["calls"]
    assert calls[:6] == [
        ("model_init", "m"),
        ("init", 2),
        ("include", "a"),
        ("include", "b"),
        ("include", "c"),
        ("fini", -1),
    ]
    assert calls[-1] == ("model_fini", 2)


def test_a_batch_that_the_strategy_closed_waits_for_nobody(tmp_path: Path) -> None:
    config = config_of(max_queue_delay_microseconds=1000)
    batching = Batching(BatchStrategy(written(tmp_path), config), config)
    batching.submit("a")
    assert batching.take() == 1_000_000
    batching.submit("b", "c")
    assert batching.worker.is_woken
    assert batching.take() == "a b"
    assert batching.take() == 1_000_000
    batching.clock.advance_us(1000)
    assert batching.take() == "c"


def test_the_first_request_is_executed_whatever_is_said_of_it(tmp_path: Path) -> None:
    config = config_of()
    strategy = BatchStrategy(written(tmp_path, "def include_request(request, batch): return False"), config)
    batching = Batching(strategy, config)
    batching.submit("a", "b")
    assert [batching.take(), batching.take()] == ["a", "b"]


def test_a_batch_holds_no_more_rows_than_the_model_takes(tmp_path: Path) -> None:
    config = config_of()
    strategy = BatchStrategy(written(tmp_path, "def include_request(request, batch): return True"), config)
    batching = Batching(strategy, config)
    batching.submit("a", "b", rows=5)
    assert [batching.take(), batching.take()] == ["a", "b"]


def test_a_strategy_that_fails_ends_its_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of()
    strategy = BatchStrategy(written(tmp_path, "def include_request(request, batch): 1 / 0"), config)
    batching = Batching(strategy, config)
    batching.submit("a", "b")
    with caplog.at_level(logging.ERROR):
        assert [batching.take(), batching.take()] == ["a", "b"]
    assert len(caplog.records) == 1, "once is enough"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x = 1", "needs a function include_request"),
        ("raise ValueError('no')", "failed: ValueError: no"),
        ("def include_request(r, b): pass\ndef model_init(config): 1 / 0", "failed: ZeroDivisionError"),
    ],
)
def test_a_strategy_that_cannot_be_used_fails_the_load(tmp_path: Path, source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        BatchStrategy(written(tmp_path, source), config_of())


def test_a_changed_file_is_another_strategy(tmp_path: Path) -> None:
    first = BatchStrategy(written(tmp_path, "def include_request(request, batch): return 1"), config_of())
    second = BatchStrategy(written(tmp_path, "def include_request(request, batch): return 2"), config_of())
    assert (first._include(None, None), second._include(None, None)) == (1, 2)


def test_the_nearest_file_is_the_strategy(tmp_path: Path) -> None:
    version, model = tmp_path / "1", tmp_path
    version.mkdir()
    assert find_strategy(config_of(), [version, model]) is None
    assert find_strategy(config_of(), [version, written(model).parent]) == (model / "batchstrategy.py").resolve()
    assert find_strategy(config_of(), [written(version).parent, model]) == (version / "batchstrategy.py").resolve()
    assert find_strategy(batching_config(), [version, model]) is None, (
        "without dynamic batching there is nothing to form"
    )


@pytest.mark.parametrize(("named", "problem"), [("s.so", "is a compiled library"), ("none.py", "no Python file")])
def test_a_strategy_that_is_named_must_be_there_and_in_python(tmp_path: Path, named: str, problem: str) -> None:
    (tmp_path / "s.so").touch()
    config = batching_config(
        dynamic_batching=ModelDynamicBatching(), parameters={STRATEGY_PARAMETER: str(tmp_path / named)}
    )
    with pytest.raises(ConfigError, match=problem):
        find_strategy(config, [])

"""Triton's in-process API by its names. Its own tests (python/test/test_api.py) pass too, tried by hand."""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.asking import wait_for

from modelserver.embed.foreign import tritonserver
from modelserver.embed.foreign.program import run_file

ECHO = """
backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_%s dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_%s dims: [ -1 ] } ]
"""
REPEAT = """
backend: "repeat"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
MODELS = {"numbers": ECHO % ("FP32", "FP32"), "texts": ECHO % ("STRING", "STRING"), "repeat": REPEAT}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, config in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[tritonserver.Server]:
    options = tritonserver.Options(
        str(repository),
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
        startup_models=["numbers", "texts"],
        metrics_configuration={"": {"summary_latencies": "true"}},
    )
    started = tritonserver.Server(options).start(wait_until_ready=True)
    yield started
    started.stop()
    with pytest.raises(tritonserver.InvalidArgumentError, match="Server not started"):
        started.ready()


def test_tensors_are_shared_with_other_libraries(server: tritonserver.Server) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for given in (rows, torch.from_numpy(rows), tritonserver.Tensor.from_dlpack(rows)):
        (response,) = server.model("numbers").infer(request_id="a", inputs={"INPUT0": given}, output_memory_type="cpu")
        output = response.outputs["OUTPUT0"]
        assert (response.request_id, response.final, output.data_type) == ("a", True, tritonserver.DataType.FP32)
        np.testing.assert_array_equal(np.from_dlpack(output), rows)
        assert torch.from_dlpack(output).data_ptr() == output.data_ptr
    halves = torch.ones(2, dtype=torch.bfloat16)
    assert torch.equal(torch.from_dlpack(tritonserver.Tensor.from_dlpack(halves)), halves)
    with pytest.raises(tritonserver.InvalidArgumentError, match="contiguous"):
        tritonserver.Tensor.from_dlpack(np.ones((4, 4))[:, 1])


def test_texts(server: tritonserver.Server) -> None:
    for given in ([["ä", "b"]], tritonserver.Tensor.from_string_array([["ä", "b"]])):
        (response,) = server.model("texts").infer(inputs={"INPUT0": given})
        assert response.outputs["OUTPUT0"].to_string_array().tolist() == [["ä", "b"]]
    with pytest.raises(tritonserver.UnsupportedError, match="to_bytes_array"):
        np.from_dlpack(response.outputs["OUTPUT0"])
    with pytest.raises(tritonserver.InvalidArgumentError, match="not BYTES"):
        tritonserver.Tensor.from_dlpack(np.ones(1)).to_bytes_array()


def test_what_cannot_work_is_refused_at_once(server: tritonserver.Server) -> None:
    model = server.model("numbers")
    rows = np.ones((1, 1), np.float32)
    for fields, message in (
        ({"inputs": {"INPUT0": rows}, "parameters": {"a": {}}}, "parameter 'a'"),
        ({"inputs": {"INPUT0": rows}, "output_memory_type": "tape"}, "Invalid memory type tape"),
        ({"inputs": {"INPUT0": object()}}, "not supported"),
        ({"inputs": {"OTHER": rows}}, "OTHER"),
    ):
        with pytest.raises(tritonserver.InvalidArgumentError, match=message):
            model.infer(**fields)
    with pytest.raises(tritonserver.NotFoundError, match="nowhere"):
        server.model("nowhere").infer(inputs={})
    (response,) = model.infer(inputs={"INPUT0": rows}, output_memory_type="gpu", raise_on_error=False)
    assert isinstance(response.error, tritonserver.InvalidArgumentError)


def test_models_are_loaded_described_and_unloaded(server: tritonserver.Server) -> None:
    assert server.models()["repeat"].state is None
    model = server.load("repeat")
    assert (model.ready(), server.models()["repeat", 1].state) == (True, "READY")
    assert model.transaction_properties() is tritonserver.ModelTxnPropertyFlag.DECOUPLED
    assert server.model("numbers").batch_properties() is tritonserver.ModelBatchFlag.FIRST_DIM
    assert [each["name"] for each in model.metadata()["outputs"]] == ["OUT", "IDX"]
    ours: queue.SimpleQueue[tritonserver.InferenceResponse] = queue.SimpleQueue()
    inputs = {"IN": np.array([4, 2], np.int32), "DELAY": np.zeros(2, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    responses = list(model.infer(inputs=inputs, response_queue=ours))
    assert [int(np.from_dlpack(each.outputs["OUT"])[0]) for each in responses if each.outputs] == [4, 2]
    assert [each.final for each in responses] == [False] * (len(responses) - 1) + [True]
    assert [ours.get_nowait() for _ in responses] == responses
    # A request is counted when the model has returned, which is after its last response.
    wait_for(lambda: model.statistics()["model_stats"][0]["inference_count"] == 1, "the request's count")
    assert 'nv_inference_count{model="repeat"' in server.metrics()
    server.unload(model, wait_until_unloaded=True)
    assert not model.ready()
    with pytest.raises(KeyError, match="Unknown Model: nowhere"):
        server.models()["nowhere"]


@pytest.fixture
def more(tmp_path: Path) -> str:
    root = tmp_path / "more"
    for name in ("numbers", "repeat"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(MODELS[name])
    return str(root)


def test_repositories_come_and_go(server: tritonserver.Server, more: str) -> None:
    known = server.models().keys()
    server.register_model_repository(more, {"numbers": "mine", "repeat": "slow"})
    assert server.models().keys() == known | {("mine", -1), ("slow", -1)}
    assert server.load("mine").metadata()["name"] == "mine"
    (response,) = server.model("mine").infer(inputs={"INPUT0": np.ones((1, 1), np.float32)})
    assert response.error is None
    inputs = {"IN": np.ones(2, np.int32), "DELAY": np.full(2, 50, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    waiting = server.load("slow").infer(inputs=inputs)
    server.unregister_model_repository(more)
    assert [each.error for each in waiting if each.outputs] == [None, None]
    assert server.models().keys() == known
    with pytest.raises(tritonserver.NotFoundError, match="'mine'"):
        server.model("mine").infer(inputs={})
    with pytest.raises(tritonserver.TritonError, match="'mine': model not found"):
        server.load("mine")
    assert 'nv_inference_count{model="slow"' not in server.metrics()


def test_a_second_model_of_a_name_is_not_loaded_and_the_first_stays(server: tritonserver.Server, more: str) -> None:
    server.register_model_repository(f"{more}/")
    try:
        with pytest.raises(tritonserver.AlreadyExistsError, match="two or more repositories"):
            server.load("numbers")
    finally:
        server.unregister_model_repository(more)
    assert server.model("numbers").ready()
    server.load("numbers")


def test_repositories_that_cannot_come_or_go(server: tritonserver.Server, repository: Path, more: str) -> None:
    known = server.models().keys()
    for path, names, error, message in (
        (str(repository), None, tritonserver.AlreadyExistsError, "already been registered"),
        (f"{more}/nowhere", None, tritonserver.InvalidArgumentError, "repository not found"),
        (more, {"nothing": "a"}, tritonserver.InvalidArgumentError, "no directory 'nothing'"),
        (more, {"numbers": "../a"}, tritonserver.InvalidArgumentError, "path traversal"),
        (more, {"numbers": 1}, tritonserver.InvalidArgumentError, "a model's name is a text"),
        (more, {"numbers": "repeat"}, tritonserver.AlreadyExistsError, "conflicting mapping for 'repeat'"),
        (f"{more}/numbers", {"1": "a"}, tritonserver.InvalidArgumentError, "directories of a local repository"),
    ):
        with pytest.raises(error, match=message):
            server.register_model_repository(path, names)
    with pytest.raises(tritonserver.InvalidArgumentError, match="failed to unregister"):
        server.unregister_model_repository(more)
    assert server.models().keys() == known


def test_metrics_of_the_program(server: tritonserver.Server) -> None:
    kind = tritonserver.MetricKind
    orders = tritonserver.MetricFamily(kind.COUNTER, "orders", "Orders so far")
    paid, open_ones = tritonserver.Metric(orders, {"state": "paid"}), tritonserver.Metric(orders, {"state": "open"})
    paid.increment(2)
    paid.increment(0.5)
    again = tritonserver.Metric(tritonserver.MetricFamily(kind.COUNTER, "orders", "Orders so far"), {"state": "paid"})
    level = tritonserver.Metric(tritonserver.MetricFamily(kind.GAUGE, "level", "Of the tank"))
    level.set_value(4)
    level.increment(-1)
    assert (paid.value, again.value, open_ones.value, level.value, level.kind) == (2.5, 2.5, 0, 3, kind.GAUGE)
    page = server.metrics()
    for line in (
        "# HELP orders Orders so far",
        "# TYPE orders counter",
        'orders{state="paid"} 2.5',
        "# TYPE level gauge",
        "level 3",
    ):
        assert line in [row.removesuffix(".0") for row in page.splitlines()]
    del paid, again, orders, level
    assert 'state="paid"' not in server.metrics()
    assert 'orders{state="open"}' in server.metrics()


def test_metrics_that_cannot_be(server: tritonserver.Server) -> None:
    kind = tritonserver.MetricKind
    family = tritonserver.MetricFamily(kind.COUNTER, "visits", "")
    metric = tritonserver.Metric(family)
    for call, error, message in (
        (lambda: metric.increment(-1), tritonserver.InvalidArgumentError, "non-negative"),
        (lambda: metric.set_value(1), tritonserver.UnsupportedError, "set_value"),
        (lambda: tritonserver.MetricFamily(kind.COUNTER, "a b", ""), tritonserver.InvalidArgumentError, "'a b'"),
        (lambda: tritonserver.MetricFamily(kind.GAUGE, "visits", ""), tritonserver.AlreadyExistsError, "a counter"),
        (lambda: tritonserver.MetricFamily("gauge", "a", ""), TypeError, "MetricKind"),
        (lambda: tritonserver.Metric(family, {"a-b": "c"}), tritonserver.InvalidArgumentError, "'a-b'"),
        (lambda: tritonserver.Metric(family, {"a": 1}), tritonserver.InvalidArgumentError, "texts"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert "\nvisits 0" in server.metrics()


async def test_on_an_event_loop(server: tritonserver.Server) -> None:
    async def ask(number: int) -> float:
        inputs = {"INPUT0": np.full((1, 1), number, np.float32)}
        async for response in server.model("numbers").async_infer(inputs=inputs):
            return float(np.from_dlpack(response.outputs["OUTPUT0"])[0, 0])
        raise AssertionError("no response")

    assert await asyncio.gather(*map(ask, range(8))) == list(range(8))
    iterator = server.model("numbers").async_infer(inputs={"INPUT0": np.ones((1, 1), np.float32)})
    iterator.cancel()
    assert (await anext(iterator)).final


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model_repository": None}, tritonserver.InvalidArgumentError, "must be specified"),
        ({"model_repository": "/nowhere"}, tritonserver.InternalError, "/nowhere"),
        ({"server_id": 1}, TypeError, "server_id"),
        ({"backend_configuration": {"a": {"b": "c"}}, "startup_models": ["a"]}, tritonserver.TritonError, "explicit"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tritonserver.Server(**options).start()


def test_the_program_of_the_page(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
    program = tmp_path / "app.py"
    program.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1])
    (tmp_path / "models").mkdir()
    (Path(more) / "numbers").rename(Path(more) / "numbers-v2")
    monkeypatch.chdir(tmp_path)
    run_file(program, ["tritonserver"], [])
    metrics = capsys.readouterr().out
    assert 'model="numbers"' in metrics
    assert 'orders{state="paid"} 1.0' in metrics


def test_logs_go_where_the_options_say(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"model_repository": str(repository), "exit_on_error": False}
    iso = tritonserver.LogFormat.ISO8601
    file = tmp_path / "log"
    server = tritonserver.Server(**options, log_file=str(file), log_info=True, log_format=iso).start()
    logging.getLogger("modelserver.test").warning("a warning")
    server.stop()
    lines = file.read_text().splitlines()
    assert "stopped" in lines[-1]
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z INFO ", line) for line in lines)
    assert not [record for record in caplog.records if record.name.startswith("modelserver")]
    with pytest.raises(tritonserver.InvalidArgumentError, match="cannot open"):
        tritonserver.Server(**options, log_file=str(tmp_path)).start()
    logging.getLogger("modelserver.test").warning("the program's again")
    assert [record.getMessage() for record in caplog.records] == ["the program's again"]
    assert capsys.readouterr().err == ""


def test_a_program_is_run_as_it_is(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = tmp_path / "app.py"
    program.write_text(f"""
import numpy, tritonserver
server = tritonserver.Server(model_repository={str(repository)!r}, exit_on_error=False).start()
(response,) = server.model("numbers").infer(inputs={{"INPUT0": numpy.ones((1, 2), "f4")}})
print(numpy.from_dlpack(response.outputs["OUTPUT0"]).tolist())
for change in (server.register_model_repository, server.unregister_model_repository):
    try:
        change({str(repository)!r})
    except tritonserver.UnsupportedError as error:
        print(str(error).partition(" while")[0])
server.stop()
""")
    run_file(program, ["tritonserver"], [])
    assert capsys.readouterr().out == "[[1.0, 1.0]]\nto add a model repository\nto remove a model repository\n"

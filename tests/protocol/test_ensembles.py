"""Ensembles as clients meet them, over both protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import scripted
from support.async_clients import AsyncClient
from support.clients import ClientError, HttpClient, ProtocolClient
from support.events import EventCall
from support.gate import BACKEND_DIRECTORY, gate_of, until, write_gated
from support.grpc_stream import StreamAnswer, StreamPeer, text_request
from support.model_files import write_identity, write_model
from support.python_models import write_model as write_python
from support.scripted import write_scripted
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

CHAIN = """
platform: "ensemble"
max_batch_size: 8
input [ {{ name: "IN", data_type: TYPE_INT32, dims: [ -1 ] }} ]
output [ {{ name: "OUT", data_type: TYPE_INT32, dims: [ -1 ] }} ]
ensemble_scheduling {{ step [
  {{ model_name: "{first}" model_version: -1
     input_map {{ key: "{source}" value: "IN" }} output_map {{ key: "{target}" value: "mid" }} }},
  {{ model_name: "{second}" model_version: -1
     input_map {{ key: "INPUT0" value: "mid" }} output_map {{ key: "OUTPUT0" value: "OUT" }} }} ] }}
"""
CHOICE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] },
        { name: "EXTRA", data_type: TYPE_INT32, dims: [ -1 ], optional: true },
        { name: "FAST", data_type: TYPE_BOOL, dims: [ 1 ], optional: true } ]
output [ { name: "OUT", data_type: TYPE_INT32, dims: [ -1 ] } ]
parameters { key: "step.echo.condition" value { string_value: "FAST" } }
parameters { key: "step.1.condition" value { string_value: "!FAST" } }
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "OUT" } },
  { model_name: "sum" model_version: -1
    input_map [ { key: "X" value: "IN" }, { key: "EXTRA" value: "EXTRA" } ]
    output_map { key: "Y" value: "OUT" } } ] }
"""
SUM_CONFIG = """
max_batch_size: 8
input [ { name: "X", data_type: TYPE_INT32, dims: [ -1 ] },
        { name: "EXTRA", data_type: TYPE_INT32, dims: [ -1 ], optional: true } ]
output [ { name: "Y", data_type: TYPE_INT32, dims: [ -1 ] } ]
"""
# Adds up its inputs, and a thousand; minus one ends the process.
SUM = """
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            tensors = [tensor.as_numpy() for tensor in request.inputs()]
            if (tensors[0] == -1).any():
                print("no minus one, please", flush=True)
                os._exit(3)
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", sum(tensors) + 1000)])
"""
SAY = """
platform: "ensemble"
input [ { name: "SCRIPT", data_type: TYPE_STRING, dims: [ -1 ] } ]
output [ { name: "TEXT", data_type: TYPE_STRING, dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "many" model_version: -1
    input_map { key: "SCRIPT" value: "SCRIPT" } output_map { key: "OUT" value: "said" } },
  { model_name: "words" model_version: -1
    input_map { key: "INPUT0" value: "said" } output_map { key: "OUTPUT0" value: "TEXT" } } ] }
"""


def chain(first: str, second: str, source: str = "INPUT0", target: str = "OUTPUT0") -> str:
    return CHAIN.format(first=first, second=second, source=source, target=target)


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp(f"ensembles-{layout}")
    write_all(root)
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


def write_all(root: Path) -> None:
    write_identity(root, "echo", data_type="TYPE_INT32")
    write_model(
        root,
        "pairs",
        'backend: "identity" max_batch_size: 8 input { name: "INPUT0" data_type: TYPE_INT32 dims: 2 } '
        'output { name: "OUTPUT0" data_type: TYPE_INT32 dims: 2 }',
    )
    write_gated(root, "first", more="dynamic_batching { }")
    write_gated(root, "second", more="dynamic_batching { }")
    write_python(root, SUM, SUM_CONFIG).rename(root / "sum")
    write_scripted(root, "many")
    write_identity(root, "words", data_type="TYPE_STRING", max_batch_size=0)
    for name, config in {
        "twice": chain("echo", "echo"),
        "held": chain("first", "second"),
        "nested": chain("twice", "echo", "IN", "OUT"),
        "picky": chain("echo", "pairs"),
        "choice": CHOICE,
        "say": SAY,
    }.items():
        write_model(root, name, config)


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def numbers(*values: int) -> np.ndarray[Any, Any]:
    return np.array([values], np.int32)


def statistics(client: ProtocolClient, model: str) -> dict[str, Any]:
    [row] = client.statistics(model)
    return row


def counts(client: ProtocolClient, *models: str) -> list[int]:
    return [int(statistics(client, model)["inference_stats"]["success"]["count"]) for model in models]


@pytest.mark.parametrize("model", ["twice", "nested"])
def test_an_answer_comes_from_the_ensemble(client: ProtocolClient, model: str) -> None:
    answer = client.infer(model, {"IN": numbers(1, 2, 3)}, request_id="me")
    assert answer["OUT"].tolist() == [[1, 2, 3]]
    assert (answer.model_name, answer.model_version, answer.id) == (model, "1", "me")


def test_it_is_described_as_a_model(client: ProtocolClient) -> None:
    metadata = client.model_metadata("twice")
    assert metadata["platform"] == "ensemble"
    assert [int(size) for size in metadata["inputs"][0]["shape"]] == [-1, -1]
    assert client.model_config("twice")["ensemble_scheduling"]["step"][1]["model_name"] == "echo"
    assert client.model_config("say")["model_transaction_policy"]["decoupled"] is True
    assert client.is_model_ready("twice")


def test_statistics_count_the_ensemble_and_each_step(client: ProtocolClient) -> None:
    before = counts(client, "twice", "echo")
    client.infer("twice", {"IN": np.zeros((3, 2), np.int32)})
    after = counts(client, "twice", "echo")
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 2]
    own = statistics(client, "twice")
    assert int(own["inference_count"]) >= 3


def test_the_phases_of_an_ensemble_are_the_sums_of_its_steps(protocol: type[ProtocolClient], tmp_path: Path) -> None:
    write_identity(tmp_path, "echo", data_type="TYPE_INT32")
    write_model(tmp_path, "twice", chain("echo", "echo"))
    with running_server(tmp_path) as running, protocol(running) as client:
        for _ in range(3):
            client.infer("twice", {"IN": np.zeros((3, 2), np.int32)})
        own, step = statistics(client, "twice")["inference_stats"], statistics(client, "echo")["inference_stats"]
    assert own["queue"]["ns"] in (0, "0")
    for phase in ("compute_input", "compute_infer", "compute_output"):
        assert int(own[phase]["count"]) == 3
        assert int(own[phase]["ns"]) == int(step[phase]["ns"])
    assert int(own["compute_infer"]["ns"]) > 0


def test_an_error_names_its_step(client: ProtocolClient) -> None:
    failures = int(statistics(client, "picky")["inference_stats"]["fail"]["count"])
    with pytest.raises(ClientError) as caught:
        client.infer("picky", {"IN": numbers(1, 2, 3)})
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert "in ensemble 'picky', unexpected shape for input 'INPUT0'" in caught.value.message
    assert "; failed at step[1] (model 'pairs')" in caught.value.message
    assert client.infer("picky", {"IN": numbers(1, 2)})["OUT"].tolist() == [[1, 2]]
    assert int(statistics(client, "picky")["inference_stats"]["fail"]["count"]) == failures + 1


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"FAST": np.array([[True]])}, [[7]]),
        ({"FAST": np.array([[False]])}, [[1007]]),
        ({}, [[1007]]),
        ({"EXTRA": numbers(100)}, [[1107]]),
    ],
)
def test_a_request_chooses_its_branch(
    client: ProtocolClient, inputs: dict[str, Any], expected: list[list[int]]
) -> None:
    assert client.infer("choice", {"IN": numbers(7), **inputs})["OUT"].tolist() == expected


def test_a_step_whose_process_ends_fails_only_the_requests_that_it_had(client: ProtocolClient) -> None:
    with pytest.raises(
        ClientError, match=r"(?s)in ensemble 'choice', .*no minus one, please.*; failed at step\[1\] \(model 'sum'\)"
    ):
        client.infer("choice", {"IN": numbers(-1)})
    assert client.infer("choice", {"IN": numbers(1)})["OUT"].tolist() == [[1001]]


async def test_steps_batch_inside_their_models(async_protocol: type[AsyncClient], served: RunningServer) -> None:
    gates = [gate_of("first"), gate_of("second")]
    model = served.server.repository.get("first", None)
    async with async_protocol(served) as client:
        for gate in gates:
            gate.hold()
        try:
            tasks = [asyncio.create_task(client.infer("held", {"IN": numbers(0)}, request_id="0"))]
            await until(lambda: bool(gates[0].batches), "the first request executed")
            tasks += [
                asyncio.create_task(client.infer("held", {"IN": numbers(number)}, request_id=str(number)))
                for number in range(1, 5)
            ]
            await until(lambda: served.call(lambda: model.queue_depth) == 4, "the others wait")
            gates[0].let("0")
            await until(lambda: len(gates[0].batches) == 2, "they share a batch")
            await until(lambda: bool(gates[1].batches), "the first request is at its second step")
            gates[0].release()
            await until(lambda: served.call(lambda: held_depth(served)) == 4, "they wait for the second step")
        finally:
            for gate in gates:
                gate.release()
        answers = await asyncio.gather(*tasks)
    assert [answer["OUT"].tolist() for answer in answers] == [[[number]] for number in range(5)]
    assert sorted(gates[0].batches[1]) == sorted(gates[1].batches[1]) == ["1", "2", "3", "4"]


def held_depth(served: RunningServer) -> int:
    return served.server.repository.get("second", None).queue_depth


async def test_a_client_that_leaves_starts_no_further_step(
    async_protocol: type[AsyncClient], served: RunningServer
) -> None:
    ensemble, second = (served.server.repository.get(name, None) for name in ("held", "second"))
    before = served.call(lambda: second.statistics.snapshot().success.count)
    gate = gate_of("first")
    gate.hold()
    try:
        async with async_protocol(served) as client:
            task = asyncio.create_task(client.infer("held", {"IN": numbers(1)}, request_id="left"))
            await until(lambda: bool(gate.batches), "the first step executes")
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await until(lambda: served.call(lambda: ensemble.inflight) == 0, "the ensemble has let go")
    finally:
        gate.release()
    await until(
        lambda: served.call(lambda: served.server.repository.get("first", None).inflight) == 0, "the step has ended"
    )
    assert served.call(lambda: second.statistics.snapshot().success.count) == before


# Decoupled ones.


def stream(served: RunningServer, *script: str, **parameters: bool) -> list[StreamAnswer]:
    with StreamPeer(served) as peer:
        peer.send(text_request("say", "SCRIPT", script, "x", **parameters))
        return peer.rest()


def texts(answers: list[StreamAnswer]) -> list[str]:
    return [answer.error or "".join(value[4:].decode() for value in answer.outputs.values()) for answer in answers]


def test_responses_stream_through_the_steps(served: RunningServer) -> None:
    answers = stream(served, "say a", "say b", "end", triton_enable_empty_final_response=True)
    assert texts(answers) == ["a", "b", ""]
    assert [answer.is_final for answer in answers] == [False, False, True]
    assert {answer.model_name for answer in answers} == {"say"}


def test_an_error_ends_the_stream_of_its_request(served: RunningServer) -> None:
    answers = stream(served, "say a", "fail too bad", "end")
    assert texts(answers)[0] == "a"
    assert "in ensemble 'say', too bad" in texts(answers)[1]
    assert len(answers) == 2


def test_a_decoupled_ensemble_has_no_single_answer(client: ProtocolClient) -> None:
    one = client.infer("say", {"SCRIPT": np.array([b"say a", b"end"], dtype=object)})
    assert one["TEXT"].tolist() == [b"a"]
    with pytest.raises(ClientError):
        client.infer("say", {"SCRIPT": np.array([b"say a", b"say b", b"end"], dtype=object)})


def test_a_slow_reader_slows_the_source_down(served: RunningServer) -> None:
    scripted.events.clear()
    many = 3000
    with StreamPeer(served) as peer:
        peer.send(text_request("say", "SCRIPT", (f"flood {many}", "last done"), "x"))
        peer.take(1)
        until_true(lambda: len(scripted.events) > 70, "the model has begun")
        seen = [-1]

        def stands() -> bool:
            before, seen[0] = seen[0], len(scripted.events)
            return before == seen[0]

        until_true(stands, "the model waits", interval_s=0.3)
        assert len(scripted.events) < many - 500
        assert texts(peer.rest())[-1] == "done"


def test_events_come_from_the_last_step(served: RunningServer) -> None:
    document = {"SCRIPT": ["say a", "say b", "end"]}
    with EventCall(served, "/v2/models/say/generate_stream", document) as call:
        assert [event["TEXT"] for event in call] == ["a", "b"]


def test_a_client_that_leaves_a_stream_is_told_to_its_source(served: RunningServer) -> None:
    scripted.events.clear()
    with StreamPeer(served) as peer:
        peer.send(text_request("say", "SCRIPT", ("say a", "await-cancel"), "x"))
        assert next(iter(peer)).outputs
    until_true(lambda: "cancelled" in scripted.events, "the source heard of it")


# Control.


# Fails, ends its process or sleeps the first time that it sees a request.
MOODY = """
    import os, pathlib, time
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            [request] = requests
            data = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            mark = pathlib.Path(pb_utils.get_model_dir()) / f"seen{data.flat[0]}"
            if not mark.exists():
                mark.touch()
                if data.flat[0] == 1:
                    raise ValueError("not in the mood")
                if data.flat[0] == 2:
                    os._exit(1)
                if data.flat[0] == 3:
                    time.sleep(1)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", data + 1000)])]
"""
LIMITED = """
platform: "ensemble"
input [ { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] } ]
output [ { name: "OUT", data_type: TYPE_INT32, dims: [ -1 ] } ]
parameters { key: "step.m.retries" value { string_value: "10" } }
parameters { key: "step.m.timeout_microseconds" value { string_value: "500000" } }
ensemble_scheduling { step [
  { model_name: "m" model_version: -1
    input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } } ] }
"""


def test_steps_are_tried_again(tmp_path: Path) -> None:
    """After an error, the end of a process, and more time than the config gives; and the metrics tell."""
    config = "input [ { name: 'X', data_type: TYPE_INT32, dims: [ -1 ] } ]"
    write_python(tmp_path, MOODY, config + config.replace("input", "output").replace("X", "Y"))
    write_model(tmp_path, "limited", LIMITED)
    with running_server(tmp_path) as running, HttpClient(running) as client:
        for value in (1, 2, 3):
            data = np.array([value], np.int32)
            np.testing.assert_array_equal(client.infer("limited", {"IN": data})["OUT"], data + 1000)
        metrics = httpx.get(f"http://{running.metrics_url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    found = {each.name: each for each in samples if each.name.startswith("modelserver_ensemble_step_")}
    retries, timeouts = (found[f"modelserver_ensemble_step_{what}_total"] for what in ("retries", "timeouts"))
    assert retries.value >= 3
    assert timeouts.value >= 1
    assert (retries.labels["model"], retries.labels["step"]) == ("limited", "step[0] (model 'm')")


def test_models_come_and_go_with_their_ensemble(protocol: type[ProtocolClient], tmp_path: Path) -> None:
    write_identity(tmp_path, "echo", data_type="TYPE_INT32")
    write_model(tmp_path, "twice", chain("echo", "echo"))
    with running_server(tmp_path, model_control_mode="explicit") as server, protocol(server) as client:
        client.load("twice")
        assert client.is_model_ready("echo")
        client.unload("echo")
        assert not client.is_model_ready("twice")
        [row] = [row for row in client.index() if row["name"] == "twice"]
        assert (row["state"], row["reason"]) == ("UNAVAILABLE", "step[0] needs model 'echo', which is not ready")
        with pytest.raises(ClientError, match="step\\[0\\] needs model 'echo'"):
            client.infer("twice", {"IN": numbers(1)})
        client.load("echo")
        assert client.infer("twice", {"IN": numbers(1)})["OUT"].tolist() == [[1]]
        client.unload("twice", unload_dependents=True)
        assert not client.is_model_ready("echo")


def test_what_is_wrong_is_told_to_who_loads(tmp_path: Path) -> None:
    write_identity(tmp_path, "echo", data_type="TYPE_FP32")
    write_model(tmp_path, "twice", chain("echo", "nobody"))
    with running_server(tmp_path, model_control_mode="explicit") as server, HttpClient(server) as client:
        with pytest.raises(ClientError, match="there is no model 'nobody'"):
            client.load("twice")
        write_identity(tmp_path, "nobody", data_type="TYPE_FP32")
        with pytest.raises(ClientError, match="has datatype FP32, but tensor 'IN' is INT32") as caught:
            client.load("twice")
        assert "config.pbtxt:" in caught.value.message


def test_answers_are_cached_of_the_whole_and_of_each_step(protocol: type[ProtocolClient], tmp_path: Path) -> None:
    cached = "response_cache { enable: true }"
    write_identity(tmp_path, "echo", data_type="TYPE_INT32", more=cached)
    write_identity(tmp_path, "other", data_type="TYPE_INT32")
    write_model(tmp_path, "whole", chain("echo", "other") + cached)
    write_model(tmp_path, "steps", chain("echo", "other"))
    options: dict[str, Any] = {"model_control_mode": "explicit", "cache_config": ("local,size=1000000",)}
    with running_server(tmp_path, **options) as server, protocol(server) as client:
        client.load("whole")
        client.load("steps")
        for value in (1, 1, 2):
            assert client.infer("whole", {"IN": numbers(value)})["OUT"].tolist() == [[value]]
        assert hits(client, "whole") == 1
        assert hits(client, "echo") == 0
        assert counts(client, "whole", "echo", "other") == [3, 2, 2]
        assert client.infer("steps", {"IN": numbers(2)})["OUT"].tolist() == [[2]]
        assert hits(client, "echo") == 1
        assert counts(client, "echo", "other") == [3, 3]
        # What the ensemble answered with another step is not what it would answer now.
        write_identity(tmp_path, "other", data_type="TYPE_INT32", more='metric_tags { key: "new" value: "1" }')
        client.load("other")
        client.infer("whole", {"IN": numbers(2)})
        assert hits(client, "whole") == 1


def hits(client: ProtocolClient, model: str) -> int:
    return int(statistics(client, model)["inference_stats"]["cache_hit"]["count"])


SHAPED = """
platform: "ensemble"
max_batch_size: {rows}
input [ {{ name: "IN", data_type: TYPE_INT32, dims: {dims} {reshape} }} ]
output [ {{ name: "OUT", data_type: TYPE_INT32, dims: {dims} {reshape} }},
         {{ name: "SEEN", data_type: TYPE_STRING, dims: {seen} }} ]
ensemble_scheduling {{ step [
  {{ model_name: "{step}" model_version: -1 input_map {{ key: "X" value: "IN" }}
     output_map {{ key: "Y" value: "OUT" }} output_map {{ key: "SEEN" value: "SEEN" }} }} ] }}
"""
# Says which shape it has got.
SHAPES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.input_named("X").as_numpy()) for request in requests]

    def answer(self, data):
        seen = np.array(str(list(data.shape)), object)
        seen = np.full((len(data), 1) if ROWS else (1,), seen)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", data), pb_utils.Tensor("SEEN", seen)])
"""
STEPS = {"plain": (0, "[ 4 ]"), "square": (0, "[ 2, 2 ]"), "row": (0, "[ 1, 4 ]"), "any": (0, "[ -1, -1 ]"),
         "batching": (8, "[ 4 ]"), "squares": (8, "[ 2, 2 ]")}  # fmt: skip
RESHAPE = "reshape {{ shape: {} }}"
# Ensemble: its step, max_batch_size, dims, reshape, dims of SEEN; requests, and what the step sees of them. What Triton
# answers was asked of it.
SHAPES_OF: dict[str, tuple[tuple[str, int, str, str, str], dict[tuple[int, ...], str]]] = {
    "reshaped": (("plain", 0, "[ 2, 2 ]", "[ 4 ]", "[ 1 ]"), {(2, 2): "[4]"}),
    "reshaped_rows": (("batching", 8, "[ 2, 2 ]", "[ 4 ]", "[ 1 ]"), {(1, 2, 2): "[1, 4]", (3, 2, 2): "[3, 4]"}),
    "reshaped_more": (("row", 0, "[ 4 ]", "[ 1, 4 ]", "[ 1 ]"), {(4,): "[1, 4]"}),
    "reshaped_one": (("batching", 0, "[ 2, 2 ]", "[ 4 ]", "[ 1 ]"), {(2, 2): "[1, 4]"}),
    "one": (("batching", 0, "[ 4 ]", "", "[ 1 ]"), {(4,): "[1, 4]"}),
    "one_square": (("squares", 0, "[ 2, 2 ]", "", "[ 1 ]"), {(2, 2): "[1, 2, 2]"}),
    "own_rows": (("batching", 0, "[ -1, 4 ]", "", "[ -1, 1 ]"), {(1, 4): "[1, 4]", (2, 4): "[2, 4]"}),
    "loose": (("batching", 0, "[ -1, -1 ]", "", "[ -1, 1 ]"), {(2, 4): "[2, 4]"}),
    "no_rows": (("plain", 8, "[ 4 ]", "", "[ 1 ]"), {(1, 4): "[4]"}),
    "as_they_are": (("any", 8, "[ 4 ]", "", "[ -1 ]"), {(1, 4): "[1, 4]", (2, 4): "[2, 4]"}),
}


@pytest.fixture(scope="module")
def shaped(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp(f"shaped-{layout}")
    for name, (rows, dims) in STEPS.items():
        config = f"""max_batch_size: {rows}
            input {{ name: "X" data_type: TYPE_INT32 dims: {dims} }}
            output {{ name: "Y" data_type: TYPE_INT32 dims: {dims} }}
            output {{ name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }}"""
        write_python(root, SHAPES.replace("ROWS", str(rows)), config).rename(root / name)
    for name, ((step, rows, dims, reshape, seen), _) in SHAPES_OF.items():
        reshape = reshape and RESHAPE.format(reshape)
        write_model(root, name, SHAPED.format(step=step, rows=rows, dims=dims, reshape=reshape, seen=seen))
    with running_server(root, exit_on_error=True) as running:
        yield running


@pytest.mark.parametrize("name", SHAPES_OF)
def test_an_ensemble_has_shapes_of_its_own(protocol: type[ProtocolClient], shaped: RunningServer, name: str) -> None:
    with protocol(shaped) as client:
        for shape, seen in SHAPES_OF[name][1].items():
            data = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
            answer = client.infer(name, {"IN": data})
            np.testing.assert_array_equal(answer["OUT"], data)
            assert {text.decode() for text in answer["SEEN"].ravel()} == {seen}


def test_several_rows_are_refused_where_a_step_takes_one(protocol: type[ProtocolClient], shaped: RunningServer) -> None:
    with protocol(shaped) as client, pytest.raises(ClientError, match="unexpected shape for input 'X'") as refused:
        client.infer("no_rows", {"IN": np.zeros((2, 4), np.int32)})
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sequence_id", [7, "seven"])
def test_the_answer_says_to_which_sequence_it_belongs(
    protocol: type[ProtocolClient], shaped: RunningServer, sequence_id: int | str, flags: tuple[bool, bool]
) -> None:
    start, end = flags
    with protocol(shaped) as client:
        options = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        answer = client.infer("one", {"IN": np.zeros(4, np.int32)}, **options)
        assert answer.parameters == options
        assert not client.infer("one", {"IN": np.zeros(4, np.int32)}).parameters

"""Models that answer a request any number of times: over streams, in one answer, and as events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from support import scripted
from support.clients import ClientError, GrpcClient, HttpClient, ProtocolClient
from support.events import EventCall, events
from support.gate import BACKEND_DIRECTORY
from support.grpc_stream import StreamAnswer, StreamPeer, text_request
from support.model_files import write_identity
from support.scripted import write_scripted
from support.serving import RunningServer, running_server
from support.waiting import until_true
from tritonclient.utils import np_to_triton_dtype

EVENTS = {"Accept": "text/event-stream"}


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp(f"decoupled-{layout}")
    write_scripted(root, "many")
    write_scripted(root, "one", more="")
    write_identity(root, "echo", data_type="TYPE_STRING", max_batch_size=0)
    write_repeat(root)
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


def write_repeat(root: Any) -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    repeat = """
        backend: "repeat"
        input [ { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] },
                { name: "DELAY", data_type: TYPE_UINT32, dims: [ -1 ] },
                { name: "WAIT", data_type: TYPE_UINT32, dims: [ 1 ] } ]
        output [ { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] },
                 { name: "IDX", data_type: TYPE_UINT32, dims: [ 1 ] } ]
        """
    for name, config in {
        "repeat": repeat + decoupled,
        "repeat_once": repeat,
        "square": """
            backend: "square"
            model_transaction_policy { decoupled: true }
            input [ { name: "IN", data_type: TYPE_INT32, dims: [ 1 ] } ]
            output [ { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
            """,
    }.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)


@pytest.fixture(params=[HttpClient, GrpcClient], ids=["http", "grpc"])
def client(served: RunningServer, request: pytest.FixtureRequest) -> Iterator[ProtocolClient]:
    with request.param(served) as connected:
        yield connected


def script(*steps: str, request_id: str = "", model: str = "many", **parameters: bool) -> Any:
    return text_request(model, "SCRIPT", steps, request_id, **parameters)


def texts(answers: list[StreamAnswer]) -> list[str]:
    """What each answer says: its output, its error, or nothing."""
    return [answer.error or "".join(value[4:].decode() for value in answer.outputs.values()) for answer in answers]


def stream(served: RunningServer, *requests: Any, **metadata: str) -> list[StreamAnswer]:
    with StreamPeer(served, metadata) as peer:
        peer.send(*requests)
        return peer.rest()


# Streams.


@pytest.mark.parametrize("wants_empty", [False, True])
def test_the_last_response_is_marked(served: RunningServer, wants_empty: bool) -> None:
    flag = {"triton_enable_empty_final_response": wants_empty}
    answers = stream(served, script("say a", "note b", "end", request_id="x", **flag))
    assert texts(answers) == ["a", "b"] + [""] * wants_empty
    assert [answer.is_final for answer in answers] == [False, False] + [True] * wants_empty
    assert {answer.id for answer in answers} == {"x"}
    assert answers[1].parameters == {"note": "b"}


def test_a_last_response_with_outputs_is_never_empty(served: RunningServer) -> None:
    answers = stream(served, script("say a", "last b", triton_enable_empty_final_response=True))
    assert [(text, answer.is_final) for text, answer in zip(texts(answers), answers, strict=True)] == [
        ("a", False),
        ("b", True),
    ]


@pytest.mark.parametrize("wants_empty", [False, True])
def test_a_request_without_responses_ends_too(served: RunningServer, wants_empty: bool) -> None:
    answers = stream(served, script("end", triton_enable_empty_final_response=wants_empty), script("last b"))
    assert texts(answers) == [""] * wants_empty + ["b"]


def test_responses_of_different_requests_share_the_stream_as_they_come(served: RunningServer) -> None:
    with StreamPeer(served) as peer:
        peer.send(script("say a1", "await-cancel", request_id="a"))
        assert texts(peer.take(1)) == ["a1"]
        peer.send(script("say b1", "last b2", request_id="b"), script("last c1", request_id="c"))
        assert sorted(texts(peer.take(3))) == ["b1", "b2", "c1"]


def test_other_models_keep_the_order_of_requests_among_them(served: RunningServer) -> None:
    with StreamPeer(served) as peer:
        peer.send(
            script("say d", "await-cancel"),
            text_request("echo", "INPUT0", ["first"]),
            script("last second", model="one"),
            text_request("nobody", "INPUT0", ["x"]),
            text_request("echo", "INPUT0", ["last"]),
        )
        said = texts(peer.take(5))
    ordered = [text for text in said if text != "d"]
    assert [ordered[0], ordered[1], ordered[3]] == ["first", "second", "last"]
    assert "'nobody'" in ordered[2]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (("say a", "fail b", "say c", "end"), [("a", False), ("b", False), ("c", False)]),
        (("say a", "last-fail b"), [("a", False), ("b", True)]),
    ],
)
def test_errors_are_messages_and_the_stream_goes_on(
    served: RunningServer, steps: tuple[str, ...], expected: list[tuple[str, bool]]
) -> None:
    with StreamPeer(served) as peer:
        peer.send(script(*steps, request_id="e"))
        answers = peer.take(len(expected))
        assert [(text, answer.is_final) for text, answer in zip(texts(answers), answers, strict=True)] == expected
        assert {(answer.id, answer.model_name) for answer in answers} == {("e", "many")}
        peer.send(script("last on"))
        assert texts(peer.rest()) == ["on"]


def test_with_grpc_errors_the_first_one_ends_the_call(served: RunningServer) -> None:
    scripted.events.clear()
    with StreamPeer(served, {"triton_grpc_error": "true"}) as peer:
        peer.send(script("await-cancel"), script("say a", "fail b", "say c", "end"))
        assert texts(peer.take(1)) == ["a"]
        with pytest.raises(grpc.RpcError) as caught:
            peer.take(1)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "b")
    until_true(lambda: "cancelled" in scripted.events, "the other request was cancelled")


def test_a_cancelled_call_cancels_its_requests(served: RunningServer) -> None:
    scripted.events.clear()
    with StreamPeer(served) as peer:
        peer.send(script("say a", "await-cancel", "end"), script("say b", "await-cancel", "drop"))
        peer.take(2)
        peer.cancel()
        until_true(
            lambda: scripted.events.count("cancelled") >= 2, "both models heard of it"
        )  # an earlier test's may be late
    until_true(lambda: inflight(served) == 0, "both requests ended")


@pytest.fixture(params=[0, 1])
def log_verbose_level(request: pytest.FixtureRequest, served: RunningServer) -> Iterator[int]:
    """With 1, a line in the log for each request, another stream stands before the reader."""
    with GrpcClient(served) as asking:
        asking.raw.update_log_settings({"log_verbose_level": request.param})
        yield request.param
        asking.raw.update_log_settings({"log_verbose_level": 0})


def test_a_slow_reader_slows_the_model_down(
    served: RunningServer, caplog: pytest.LogCaptureFixture, log_verbose_level: int
) -> None:
    caplog.set_level(logging.DEBUG, logger="modelserver.telemetry.request_log")
    scripted.events.clear()
    many = 3000
    with StreamPeer(served) as peer:
        peer.send(script(f"flood {many}", "last done"))
        peer.take(1)
        until_true(lambda: len(scripted.events) > 70, "the model has begun")
        seen = [-1]

        def stands() -> bool:
            before, seen[0] = seen[0], len(scripted.events)
            return before == seen[0]

        until_true(stands, "the model waits", interval_s=0.3)
        assert len(scripted.events) < many - 500
    until_true(lambda: inflight(served) == 0, "the request ended")
    assert ("infer 'many'" in caplog.text) == bool(log_verbose_level)


def inflight(served: RunningServer, model: str = "many") -> int:
    return served.server.repository.get(model, None).inflight


# One answer.


@pytest.mark.parametrize("steps", [("last a",), ("say a", "end"), ("return a",)])
def test_a_call_carries_exactly_one_response(client: ProtocolClient, steps: tuple[str, ...]) -> None:
    inputs = {"SCRIPT": np.array([step.encode() for step in steps], object)}
    assert client.infer("many", inputs)["OUT"].tolist() == [b"a"]


@pytest.mark.parametrize("steps", [("end",), ("say a", "say b", "end"), ("say a", "say b", "await-cancel")])
def test_a_call_cannot_carry_another_number(
    client: ProtocolClient, served: RunningServer, steps: tuple[str, ...]
) -> None:
    inputs = {"SCRIPT": np.array([step.encode() for step in steps], object)}
    with pytest.raises(ClientError, match="decoupled transaction policy") as caught:
        client.infer("many", inputs)
    assert caught.value.status in ("501", "StatusCode.UNIMPLEMENTED")
    until_true(lambda: inflight(served) == 0, "the request ended")


@pytest.mark.parametrize(("steps", "text"), [(("drop",), "without finishing"), (("raise x",), "RuntimeError: x")])
@pytest.mark.parametrize("model", ["one", "many"])
def test_a_model_that_breaks_off_fails_the_request(
    client: ProtocolClient, model: str, steps: tuple[str, ...], text: str
) -> None:
    inputs = {"SCRIPT": np.array([step.encode() for step in steps], object)}
    with pytest.raises(ClientError, match=text):
        client.infer(model, inputs)


def test_a_model_that_is_not_decoupled_may_answer_later(client: ProtocolClient) -> None:
    inputs = {"SCRIPT": np.array([b"say a", b"end"], object)}
    assert client.infer("one", inputs)["OUT"].tolist() == [b"a"]


# Events of the infer route.


def infer_document(*steps: str) -> dict[str, object]:
    return {"id": "x", "inputs": [{"name": "SCRIPT", "datatype": "BYTES", "shape": [len(steps)], "data": list(steps)}]}


def test_an_infer_call_may_ask_for_events(served: RunningServer) -> None:
    said = events(served, "/v2/models/many/infer", infer_document("say a", "note b", "end"), EVENTS)
    assert [event["outputs"][0]["data"] for event in said] == [["a"], ["b"]]
    assert said[1]["parameters"] == {"note": "b", "triton_final_response": False}
    assert {(event["model_name"], event["id"]) for event in said} == {("many", "x")}


@pytest.mark.parametrize(
    ("model", "accept", "has_events"),
    [
        ("many", "application/json, text/event-stream", True),
        ("one", "application/json, text/event-stream", False),
        ("one", "text/event-stream", True),
        ("many", "*/*", False),
    ],
)
def test_events_are_what_a_client_accepts(served: RunningServer, model: str, accept: str, has_events: bool) -> None:
    with EventCall(served, f"/v2/models/{model}/infer", infer_document("last a"), {"Accept": accept}) as call:
        assert call.status == 200
        assert call.media_type.startswith("text/event-stream") == has_events
        document = call.next() if has_events else call.document()
    assert document["outputs"][0]["data"] == ["a"]


def test_events_are_not_binary(served: RunningServer) -> None:
    document = {**infer_document("end"), "parameters": {"binary_data_output": True}}
    with EventCall(served, "/v2/models/many/infer", document, EVENTS) as call:
        assert call.status == 400
        assert "binary" in call.document()["error"]


# Numbers.


def test_statistics_by_position_of_the_response(served: RunningServer) -> None:
    def numbers() -> dict[str, Any]:
        with HttpClient(served) as asking:
            return asking.statistics("square")[0]

    before = numbers()
    for value in (0, 1, 2):
        events(served, "/v2/models/square/generate_stream", {"IN": value})
    after = numbers()

    def grown(*path: str) -> int:
        def count(row: Any) -> int:
            for key in path:
                row = row.get(key, {})
            return int(row.get("count", 0))

        return count(after) - count(before)

    assert grown("inference_stats", "success") == grown("inference_stats", "queue") == 3
    assert grown("inference_stats", "compute_infer") == after["execution_count"] - before["execution_count"] == 3
    assert [grown("response_stats", position, "success") for position in "0123"] == [2, 1, 0, 0]
    assert [grown("response_stats", position, "empty_response") for position in "0123"] == [1, 1, 1, 0]
    with GrpcClient(served) as asking:
        assert asking.statistics("square")[0]["response_stats"].keys() == after["response_stats"].keys()


# Triton's test backends, by tritonclient.


def test_repeat_answers_each_element(served: RunningServer) -> None:
    document = {"IN": [4, 2, 0, 1], "DELAY": [1, 2, 3, 4], "WAIT": 5}
    said = events(served, "/v2/models/repeat/generate_stream", document)
    assert [(event["IDX"], event["OUT"]) for event in said] == [(0, 4), (1, 2), (2, 0), (3, 1)]


def test_a_model_that_is_not_decoupled_may_end_its_request_after_the_answer(
    protocol: type[ProtocolClient], served: RunningServer
) -> None:
    with protocol(served) as client:
        inputs = {"IN": np.array([7], np.int32), "DELAY": np.array([1], np.uint32), "WAIT": np.array([0], np.uint32)}
        assert client.infer("repeat_once", inputs)["OUT"].tolist() == [7]
        more = inputs | {"IN": np.array([7, 8], np.int32), "DELAY": np.array([1, 1], np.uint32)}
        with pytest.raises(ClientError, match="expected one element of IN"):
            client.infer("repeat_once", more)


def test_repeat_wants_a_delay_for_each_element(served: RunningServer) -> None:
    document = {"IN": [4], "DELAY": [1, 2], "WAIT": 5}
    url = f"http://{served.http_url}/v2/models/repeat/generate_stream"
    answer = httpx.post(url, json=document, timeout=30)
    assert "expected IN and DELAY shape to match, got [1] and [2]" in answer.text


def repeat_inputs(values: list[int], delays: list[int]) -> list[tritonclient.grpc.InferInput]:
    arrays = {
        "IN": np.array(values, np.int32),
        "DELAY": np.array(delays, np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }
    inputs = []
    for name, array in arrays.items():
        tensor = tritonclient.grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    return inputs


def test_repeat_overlaps_requests(served: RunningServer) -> None:
    results: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(served.grpc_url) as raw:
        raw.start_stream(callback=lambda result, error: results.put((result, error)))
        for request_id, delays in (("slow", [0, 300]), ("fast", [0, 0])):
            inputs = repeat_inputs([7, 8], delays)
            raw.async_stream_infer("repeat", inputs, request_id=request_id, enable_empty_final_response=True)
        raw.stop_stream()
    answers = [results.get_nowait() for _ in range(results.qsize())]
    assert all(error is None for _, error in answers)
    responses = [result.get_response() for result, _ in answers]
    finals = [(each.id, each.parameters["triton_final_response"].bool_param) for each in responses]
    assert [final for request_id, final in finals if request_id == "fast"] == [False, False, True]
    assert finals[-2:] == [("slow", False), ("slow", True)]


def test_repeat_stops_when_the_client_leaves(served: RunningServer) -> None:
    document = {"IN": [1, 2], "DELAY": [0, 60_000], "WAIT": 0}
    with EventCall(served, "/v2/models/repeat/generate_stream", document) as call:
        assert call.next()["OUT"] == 1
        assert inflight(served, "repeat") == 1
    until_true(lambda: inflight(served, "repeat") == 0, "the request ended")

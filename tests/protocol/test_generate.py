"""The generate extension: flat JSON in and out, one object or a stream of events."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted
from support.events import EventCall, events
from support.gate import BACKEND_DIRECTORY
from support.model_files import write_identity
from support.scripted import write_scripted
from support.serving import RunningServer, running_server
from support.waiting import until_true

STREAM = "/v2/models/many/generate_stream"
WHO = {"model_name": "many", "model_version": "1"}


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("generate")
    write_scripted(root, "many")
    write_scripted(root, "one", more="")
    for name, datatype in (("fp32", "TYPE_FP32"), ("int8", "TYPE_INT8"), ("fp16", "TYPE_FP16"), ("bool", "TYPE_BOOL")):
        write_identity(root, name, data_type=datatype)
    _write_wide(root)
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


def _write_wide(root: Path) -> None:
    (root / "wide" / "1").mkdir(parents=True)
    (root / "wide" / "config.pbtxt").write_text("""
backend: "identity"
max_batch_size: 4
input [ { name: "X", data_type: TYPE_FP32, dims: [ 2, -1 ] } ]
output [ { name: "Y", data_type: TYPE_FP32, dims: [ 2, -1 ] } ]
""")


def generate(server: RunningServer, path: str, document: object) -> tuple[int, Any]:
    with EventCall(server, f"/v2/models/{path}", document) as call:
        assert call.media_type == "application/json"
        return call.status, call.document()


def script(*steps: str, **fields: object) -> dict[str, object]:
    return {"SCRIPT": list(steps), **fields}


def text(server: RunningServer, path: str, document: object, accept: str) -> str:
    """The whole body."""
    with EventCall(server, f"/v2/models/{path}", document, {"Accept": accept}) as call:
        return call.text()


# What a client wishes for in its Accept header.

ALL_WISHES = 'application/json, text/event-stream; Events=named ;end="done"; tensors=nested'
SAID = '"model_name":"many","model_version":"1"}'


@pytest.mark.parametrize(
    ("accept", "body"),
    [
        ("*/*", f'data: {{"OUT":"a",{SAID}\n\ndata: {{"error":"b"}}\n\n'),
        ("text/event-stream; events=yes; end=soon; q=0.5", f'data: {{"OUT":"a",{SAID}\n\ndata: {{"error":"b"}}\n\n'),
        ("text/event-stream;end=done", f'data: {{"OUT":"a",{SAID}\n\ndata: {{"error":"b"}}\n\ndata: [DONE]\n\n'),
        (
            ALL_WISHES,
            f'event: response\ndata: {{"OUT":["a"],{SAID}\n\nevent: error\ndata: {{"error":"b"}}\n\n'
            "event: done\ndata: [DONE]\n\n",
        ),
    ],
)
def test_events_have_names_and_an_end_for_who_wishes_so(served: RunningServer, accept: str, body: str) -> None:
    assert text(served, "many/generate_stream", script("say a", "fail b", "end"), accept) == body


def test_a_stream_that_begins_with_an_error_has_an_end_too(served: RunningServer) -> None:
    with EventCall(served, STREAM, script("fail b", "end"), {"Accept": ALL_WISHES}) as call:
        assert call.status == 400
        assert call.text() == 'event: error\ndata: {"error":"b"}\n\nevent: done\ndata: [DONE]\n\n'


def test_events_of_the_infer_route_have_names_and_an_end_too(served: RunningServer) -> None:
    document = {"inputs": [{"name": "SCRIPT", "datatype": "BYTES", "shape": [1], "data": ["end"]}]}
    assert text(served, "many/infer", document, ALL_WISHES) == "event: done\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("model", "key", "values", "out"),
    [
        ("wide", "Y", [[1, 2], [3, 4]], "[[[1.0,2.0],[3.0,4.0]]]"),
        ("fp32", "OUTPUT0", 1.5, "[[1.5]]"),
        ("int8", "OUTPUT0", [1, 2], "[[1,2]]"),
    ],
)
def test_tensors_are_nested_for_who_wishes_so(
    served: RunningServer, model: str, key: str, values: object, out: str
) -> None:
    document = {{"Y": "X"}.get(key, "INPUT0"): values}
    assert f'"{key}":{out}' in text(served, f"{model}/generate", document, "application/json; tensors=nested")


# One object.


@pytest.mark.parametrize("path", ["many/generate", "many/versions/1/generate"])
@pytest.mark.parametrize("steps", [("last a",), ("say a", "end"), ("return a",)])
def test_the_only_response_is_an_object(served: RunningServer, path: str, steps: tuple[str, ...]) -> None:
    assert generate(served, path, script(*steps)) == (200, {"OUT": "a", **WHO})


def test_id_and_parameters_are_keys(served: RunningServer) -> None:
    status, document = generate(served, "many/generate", script("note a", "end", id="i7"))
    assert (status, document) == (200, {"OUT": "a", "note": "a", "id": "i7", **WHO})


@pytest.mark.parametrize(
    "steps", [("end",), ("say a", "say b", "end"), ("say a", "last b"), ("say a", "fail b", "end")]
)
def test_another_number_of_responses_needs_a_stream(served: RunningServer, steps: tuple[str, ...]) -> None:
    status, document = generate(served, "many/generate", script(*steps))
    if "fail b" in steps:
        assert (status, document) == (400, {"error": "b"})
    else:
        assert status == 501
        assert "exactly 1 response" in document["error"]


@pytest.mark.parametrize(
    ("model", "values", "out"),
    [
        ("fp32", 1, 1.0),
        ("fp32", [1.5], 1.5),
        ("fp32", [1, 2.5], [1.0, 2.5]),
        ("fp32", [[1, 2], [3, 4]], [1.0, 2.0, 3.0, 4.0]),
        ("int8", -5, -5),
        ("bool", True, True),
        ("bool", [True, False], [True, False]),
    ],
)
def test_values_become_tensors(served: RunningServer, model: str, values: object, out: object) -> None:
    status, document = generate(served, f"{model}/generate", {"INPUT0": values})
    assert (status, document["OUTPUT0"]) == (200, out)


@pytest.mark.parametrize("values", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1, 2], [3, 4]]], [[1], [2, 3], 4]])
def test_shapes_follow_from_the_number_of_elements_or_from_nesting(served: RunningServer, values: object) -> None:
    assert generate(served, "wide/generate", {"X": values})[1]["Y"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("values", [[1, 2, 3], [[1, 2], [3]]])
def test_what_fits_no_shape_is_refused(served: RunningServer, values: object) -> None:
    status, document = generate(served, "wide/generate", {"X": values})
    assert status == 400
    assert "'X'" in document["error"]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"INPUT0": "s"}, "'INPUT0'"),
        ({"INPUT0": None}, "'INPUT0'"),
        ({"INPUT0": {"a": 1}}, "'INPUT0'"),
        ({"INPUT0": 1000}, "'INPUT0'"),
        ({"INPUT0": 1.5}, "'INPUT0'"),
        ({"INPUT0": 1, "parameters": 5}, "'parameters'"),
        ({"INPUT0": 1, "parameters": {"INPUT0": 2}}, "already exists in request"),
        ({"INPUT0": 1, "id": 5}, "'id'"),
        ({"INPUT0": 1, "other": [1]}, "'other'"),
        ({"INPUT0": 1, "other": None}, "'other'"),
        ({"INPUT0": 1, "timeout": "soon"}, "'timeout'"),
        ({"other": 1}, "INPUT0"),
        ([1], "JSON object"),
    ],
)
def test_wrong_documents_say_what_is_wrong(served: RunningServer, document: object, text: str) -> None:
    for verb in ("generate", "generate_stream"):
        status, answer = generate(served, f"int8/{verb}", document)
        assert status == 400
        assert text in answer["error"]


def test_a_parameter_object_is_read_by_the_same_rule(served: RunningServer) -> None:
    assert generate(served, "int8/generate", {"parameters": {"INPUT0": 3, "k": "v"}})[1]["OUTPUT0"] == 3


def test_half_floats_have_no_json_form(served: RunningServer) -> None:
    status, document = generate(served, "fp16/generate", {"INPUT0": 1})
    assert status == 400
    assert "FP16" in document["error"]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(("name", "status"), [("nobody", 404), ("many/versions/9", 404), ("many/versions/x", 404)])
def test_unknown_models(served: RunningServer, verb: str, name: str, status: int) -> None:
    assert generate(served, f"{name}/{verb}", script("end"))[0] == status


@pytest.mark.parametrize("body", [b"", b"nojson", b'{"SCRIPT": "end"', b"\xff"])
def test_bodies_that_are_no_json(served: RunningServer, body: bytes) -> None:
    connection = http.client.HTTPConnection(served.http_url, timeout=10)
    connection.request("POST", STREAM, body)
    answer = connection.getresponse()
    assert answer.status == 400
    assert "error" in json.loads(answer.read())
    connection.close()


# A stream of events.


@pytest.mark.parametrize("path", [STREAM, "/v2/models/many/versions/1/generate_stream"])
def test_each_response_is_an_event(served: RunningServer, path: str) -> None:
    said = events(served, path, script("say a", "note b", "last c", id="x"))
    assert said == [
        {"OUT": "a", "id": "x", **WHO},
        {"OUT": "b", "note": "b", "id": "x", **WHO},
        {"OUT": "c", "id": "x", **WHO},
    ]


def test_an_empty_final_response_is_no_event(served: RunningServer) -> None:
    assert [event["OUT"] for event in events(served, STREAM, script("say a", "end"))] == ["a"]
    assert events(served, STREAM, script("end")) == []


@pytest.mark.parametrize("model", ["one", "many"])
def test_a_model_with_one_response_streams_too(served: RunningServer, model: str) -> None:
    said = events(served, f"/v2/models/{model}/generate_stream", script("last a"))
    assert [event["OUT"] for event in said] == ["a"]


def test_events_come_when_they_are_sent(served: RunningServer) -> None:
    scripted.events.clear()
    with EventCall(served, STREAM, script("say a", "await-cancel", "end")) as call:
        assert call.next()["OUT"] == "a"
        assert scripted.events == []
    until_true(lambda: scripted.events == ["cancelled"], "the model heard that its client left")


def test_the_first_response_decides_the_status(served: RunningServer) -> None:
    with EventCall(served, STREAM, script("fail early", "say a", "end")) as call:
        assert (call.status, call.media_type) == (400, "text/event-stream; charset=utf-8")
        assert [event.get("error") or event["OUT"] for event in call] == ["early", "a"]


@pytest.mark.parametrize("steps", [("say a", "fail late", "say b", "end"), ("say a", "last-fail late")])
def test_later_errors_are_events(served: RunningServer, steps: tuple[str, ...]) -> None:
    with EventCall(served, STREAM, script(*steps)) as call:
        assert call.status == 200
        said = [event.get("error") or event["OUT"] for event in call]
    assert said == [step.split(" ")[1] for step in steps if step != "end"]


@pytest.mark.parametrize(
    ("steps", "text"),
    [(("say a", "drop"), "without finishing"), (("say a", "wrong x"), "unexpected output"), (("raise x",), "failed")],
)
def test_a_model_that_breaks_off_ends_the_stream_with_an_error(
    served: RunningServer, steps: tuple[str, ...], text: str
) -> None:
    with EventCall(served, STREAM, script(*steps)) as call:
        assert text in list(call)[-1]["error"]


def test_a_slow_reader_slows_the_model_down(served: RunningServer) -> None:
    scripted.events.clear()
    many = 2000
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        host, port = served.http_url.split(":")
        client.connect((host, int(port)))
        body = json.dumps(script(f"flood {many}", "end")).encode()
        client.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (STREAM.encode(), len(body), body)
        )
        until_true(lambda: len(scripted.events) > 60, "the model has begun")
        settle(scripted.events)
        # 64 that nobody has read yet, and what lies on the way: in sockets, and between processes.
        assert len(scripted.events) < many - 500
    until_true(lambda: not served.server.repository.get("many", None).inflight, "the request has ended")


def settle(growing: list[str]) -> None:
    """Until nothing is added for a moment."""
    seen = [-1]

    def stands() -> bool:
        before, seen[0] = seen[0], len(growing)
        return before == seen[0]

    until_true(stands, "the model waits", interval_s=0.3)

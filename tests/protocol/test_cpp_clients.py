"""Requests as Triton's C++ clients write them, byte for byte: their gRPC client sends unsigned numbers as int64."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.python_models import write_model
from support.serving import RunningServer, running_server

from modelserver.pb import grpc_service_pb2 as pb

BIGGEST = (1 << 64) - 1
TENSORS = """
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }
"""
# What a model sees of a request that is not in its tensors.
SEER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.runs = 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.runs += 1
        seen = {
            "id": request.request_id(), "sequence_id": request.correlation_id(), "flags": request.flags(),
            "timeout": request.timeout(), "run": self.runs,
            "parameters": json.loads(request.parameters()),
        }
        for name in self.controls(request):
            seen[name] = str(request.input_named(name).as_numpy().item())
        return self.seen(json.dumps(seen))

    def controls(self, request):
        return {tensor.name() for tensor in request.inputs()} - {"INPUT0"}

    def seen(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([text], object))])
"""
# Asks the model `plain` with the parameters that came, and answers as it does.
CALLER = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        call = pb_utils.InferenceRequest(
            model_name="plain", requested_output_names=["SEEN"], inputs=request.inputs(),
            timeout=request.timeout(), parameters=json.loads(request.parameters()),
        )
        return pb_utils.InferenceResponse(call.exec().output_tensors())
"""
CORRID = """
sequence_batching {{
  control_input {{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {datatype} }} }}
}}
"""
LEVELS = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }\nmax_batch_size: 1"
PATIENT = """dynamic_batching {
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 60000000 }
}
max_batch_size: 1"""


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp(f"cpp-{layout}")
    _write(root, "plain", SEER)
    _write(root, "caller", CALLER)
    _write(root, "levels", SEER, LEVELS)
    _write(root, "patient", SEER, PATIENT)
    _write(root, "cached", SEER, "response_cache { enable: true }")
    _write(root, "sequence", SEER, CORRID.format(datatype="TYPE_UINT64"))
    _write(root, "signed", SEER, CORRID.format(datatype="TYPE_INT64"))
    _write(root, "text", SEER, CORRID.format(datatype="TYPE_STRING"))
    with running_server(root, cache_config=("local,size=1000000",)) as running:
        yield running


def _write(root: Path, name: str, source: str, config: str = "") -> None:
    write_model(root, source, f"{TENSORS}{config}").rename(root / name)


class RefusedError(Exception):
    """The server's own words for a request that it did not take."""


def _grpc(served: RunningServer, model: str, request_id: str = "", **options: Any) -> dict[str, Any]:
    """As `grpc_client.cc: PreRunProcessing` writes a request."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    parameters = message.parameters
    parameters["triton_enable_empty_final_response"].bool_param = options.get("wants_empty", False)
    if "sequence_id" in options:
        sequence_id = options["sequence_id"]
        if isinstance(sequence_id, str):
            parameters["sequence_id"].string_param = sequence_id
        else:
            parameters["sequence_id"].int64_param = _as_int64(sequence_id)
        parameters["sequence_start"].bool_param = options.get("start", False)
        parameters["sequence_end"].bool_param = options.get("end", False)
    if "priority" in options:
        parameters["priority"].uint64_param = options["priority"]
    if "timeout" in options:
        parameters["timeout"].int64_param = _as_int64(options["timeout"])
    for key, value in options.get("more", {}).items():
        setattr(parameters[key], {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)], value)
    message.inputs.add(name="INPUT0", datatype="INT32", shape=_shape(model))
    message.raw_input_contents.append(np.array([7], "<i4").tobytes())
    with grpc.insecure_channel(served.grpc_url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            answer = pb.ModelInferResponse.FromString(call(message.SerializeToString(), timeout=30))
        except grpc.RpcError as error:
            raise RefusedError(error.details()) from None  # type: ignore[attr-defined]
    return _seen(answer.raw_output_contents[0])


def _http(served: RunningServer, model: str, request_id: str = "", **options: Any) -> dict[str, Any]:
    """As `http_client.cc: PrepareRequestJson` writes a request whose outputs are not named."""
    parameters: dict[str, Any] = {}
    if "sequence_id" in options:
        parameters["sequence_id"] = options["sequence_id"]
        parameters["sequence_start"] = options.get("start", False)
        parameters["sequence_end"] = options.get("end", False)
    for key in ("priority", "timeout"):
        if key in options:
            parameters[key] = options[key]
    parameters["binary_data_output"] = True
    parameters |= options.get("more", {})
    described = {"name": "INPUT0", "datatype": "INT32", "shape": _shape(model), "parameters": {"binary_data_size": 4}}
    head = json.dumps(
        {"id": request_id, "parameters": parameters, "inputs": [described]}, separators=(",", ":")
    ).encode()
    call = urllib.request.Request(
        f"http://{served.http_url}/v2/models/{model}/infer",
        head + np.array([7], "<i4").tobytes(),
        {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"},
    )
    try:
        with urllib.request.urlopen(call, timeout=30) as answer:
            body = answer.read()
            return _seen(body[int(answer.headers["Inference-Header-Content-Length"]) :])
    except urllib.error.HTTPError as error:
        raise RefusedError(json.loads(error.read())["error"]) from None


def _as_int64(value: int) -> int:
    return int(np.uint64(value).astype(np.int64))


def _shape(model: str) -> list[int]:
    return [1, 1] if model in {"levels", "patient"} else [1]


def _seen(raw: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(raw[4:])
    return document


Send = Callable[..., dict[str, Any]]


@pytest.fixture(params=[_grpc, _http], ids=["grpc", "http"])
def send(request: pytest.FixtureRequest) -> Send:
    chosen: Send = request.param
    return chosen


@pytest.mark.parametrize("sequence_id", [1, (1 << 63) - 1, 1 << 63, BIGGEST])
def test_a_sequence_may_have_any_id_of_64_bits(served: RunningServer, send: Send, sequence_id: int) -> None:
    """The id that later requests continue is the one that the first began, and that the model sees."""
    flags = []
    for is_first, is_last in [(True, False), (False, False), (False, True)]:
        seen = send(served, "sequence", sequence_id=sequence_id, start=is_first, end=is_last)
        assert (seen["sequence_id"], seen["CORRID"]) == (sequence_id, str(sequence_id))
        flags.append(seen["flags"])
    assert flags == [1, 0, 2]


def test_a_model_gets_an_id_of_64_bits_as_it_can_hold_it(served: RunningServer, send: Send) -> None:
    signed = send(served, "signed", sequence_id=BIGGEST, start=True, end=True)
    text = send(served, "text", sequence_id=BIGGEST, start=True, end=True)
    assert (signed["CORRID"], text["CORRID"]) == ("-1", str(f"b'{BIGGEST}'"))


def test_both_protocols_mean_the_same_sequence(served: RunningServer) -> None:
    assert _grpc(served, "sequence", sequence_id=BIGGEST - 1, start=True)["flags"] == 1
    assert _http(served, "sequence", sequence_id=BIGGEST - 1, end=True)["flags"] == 2


def test_a_sequence_may_be_named_by_text(served: RunningServer, send: Send) -> None:
    assert send(served, "text", sequence_id="mine", start=True, end=True)["CORRID"] == "b'mine'"


@pytest.mark.parametrize("model", ["plain", "patient", "sequence"])
@pytest.mark.parametrize("timeout", [1 << 40, 1 << 63, BIGGEST])
def test_a_request_may_wait_for_any_time_of_64_bits(
    served: RunningServer, send: Send, model: str, timeout: int
) -> None:
    options = {"sequence_id": 5, "start": True, "end": True} if model == "sequence" else {}
    assert send(served, model, timeout=timeout, **options)["timeout"] == timeout


@pytest.mark.parametrize("priority", [1, 3, 1 << 63, BIGGEST])
def test_a_priority_beyond_the_levels_is_taken_too(served: RunningServer, send: Send, priority: int) -> None:
    assert send(served, "levels", priority=priority)["parameters"] == {}


@pytest.mark.parametrize("wants_empty", [True, False])
def test_the_flag_for_empty_responses_reaches_no_model(served: RunningServer, wants_empty: bool) -> None:
    """It is in every request of the gRPC client, and a model may pass its parameters on."""
    more = {"mine": 1, "text": "a", "flag": True}
    for model in ("plain", "caller"):
        assert _grpc(served, model, wants_empty=wants_empty)["parameters"] == {}
        assert _grpc(served, model, wants_empty=wants_empty, more=more)["parameters"] == more


def test_requests_of_all_clients_share_the_cache(served: RunningServer) -> None:
    runs = {
        _grpc(served, "cached", wants_empty=True)["run"],
        _grpc(served, "cached", wants_empty=False)["run"],
        _http(served, "cached")["run"],
    }
    assert runs == {1}


def test_no_reserved_parameter_reaches_the_model(served: RunningServer, send: Send) -> None:
    seen = send(served, "plain", "r", sequence_id=3, start=True, end=True, priority=1, timeout=9, more={"mine": 2})
    assert seen["parameters"] == {"mine": 2}
    assert (seen["id"], seen["sequence_id"], seen["flags"], seen["timeout"]) == ("r", 3, 3, 9)


def test_a_negative_number_is_refused_where_triton_refuses_it(served: RunningServer) -> None:
    message = pb.ModelInferRequest(model_name="plain")
    message.parameters["priority"].int64_param = -1
    with grpc.insecure_channel(served.grpc_url) as channel, pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString(), timeout=30)
    assert refusal.value.details().startswith("invalid value for 'priority', expected value >= 0")
    for key in ("sequence_id", "timeout", "priority"):
        with pytest.raises(RefusedError, match=f"'{key}'"):
            _http(served, "plain", more={key: -1})


def test_a_request_that_cannot_be_read_is_named(served: RunningServer) -> None:
    """By its model and its id, behind what is wrong with it: a client has many under way."""
    url = f"http://{served.http_url}/v2/models/plain/infer"
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": ["x"]}
    call = urllib.request.Request(url, json.dumps({"id": "seven", "inputs": [tensor]}).encode())
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(call, timeout=30)
    assert json.loads(refusal.value.read())["error"].endswith("(model 'plain', request id 'seven')")
    message = pb.ModelInferRequest(model_name="plain", id="seven")
    message.inputs.add(name="INPUT0", datatype="INT32", shape=[-1])
    with grpc.insecure_channel(served.grpc_url) as channel, pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString(), timeout=30)
    assert failure.value.details().endswith("(model 'plain', request id 'seven')")


def test_data_of_the_wrong_size_is_refused_in_tritons_words(served: RunningServer) -> None:
    sentence = "input byte size mismatch for input 'INPUT0' for model 'plain'. Expected 8, got 4"
    parameters = {"binary_data_size": 4}
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [2], "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    url = f"http://{served.http_url}/v2/models/plain/infer"
    call = urllib.request.Request(url, head + bytes(4), {"Inference-Header-Content-Length": str(len(head))})
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(call, timeout=30)
    assert json.loads(refusal.value.read())["error"].startswith(sentence)
    message = pb.ModelInferRequest(model_name="plain", raw_input_contents=[bytes(4)])
    message.inputs.add(name="INPUT0", datatype="INT32", shape=[2])
    with grpc.insecure_channel(served.grpc_url) as channel, pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString(), timeout=30)
    assert failure.value.details().startswith(sentence)

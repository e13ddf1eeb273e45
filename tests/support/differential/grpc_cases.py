"""Messages and streams that only gRPC has, sequences, and shared memory, trace and log settings over both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from support.differential.facts import Case, http_facts, phrases, rpc_facts
from support.differential.inference import Inference, Input, message_facts
from support.differential.target import Target
from tritonclient.grpc import service_pb2


def _message(change: Callable[[Any], None]) -> Callable[[Target], Any]:
    """An inference that would be good, changed."""
    message = Inference("echo", (Input("INPUT0", "FP32", (1, 2), (1.0, 2.0)),)).message()
    change(message)

    def ask(target: Target) -> Any:
        reply = target.rpc("ModelInfer", message)
        if reply.code != "OK":
            return {"code": reply.code, "says": phrases(reply.text, ())}
        return message_facts(reply.message)

    return ask


def _contents(message: Any, field_name: str, values: Sequence[Any]) -> None:
    del message.raw_input_contents[:]
    getattr(message.inputs[0].contents, field_name).extend(values)


def _both(message: Any) -> None:
    message.inputs[0].contents.fp32_contents.extend([1, 2])


_MESSAGES: dict[str, Callable[[Any], None]] = {
    "contents of another datatype": lambda message: _contents(message, "int_contents", [1, 2]),
    "contents too few": lambda message: _contents(message, "fp32_contents", [1]),
    "contents too many": lambda message: _contents(message, "fp32_contents", [1, 2, 3]),
    "contents and raw": _both,
    "no contents": lambda message: message.ClearField("raw_input_contents"),
    "a raw part too many": lambda message: message.raw_input_contents.append(b"x"),
    "an empty raw part": lambda message: message.raw_input_contents.__setitem__(0, b""),
    "a parameter without a value": lambda message: message.parameters["a"].SetInParent(),
    "an unsigned parameter": lambda message: message.parameters["priority"].__setattr__("uint64_param", 1),
    "an unsigned sequence": lambda message: message.parameters["sequence_id"].__setattr__("uint64_param", 7),
    "a negative sequence": lambda message: message.parameters["sequence_id"].__setattr__("int64_param", -7),
    "a fraction for a priority": lambda message: message.parameters["priority"].__setattr__("double_param", 1.5),
    "final wanted in a unary call": lambda message: message.parameters[
        "triton_enable_empty_final_response"
    ].__setattr__("bool_param", True),
    "no model": lambda message: message.__setattr__("model_name", ""),
    "a huge version": lambda message: message.__setattr__("model_version", "99999999999999999999"),
}


def _stream(
    requests: Sequence[Inference], target: Target, *, metadata: Mapping[str, str] | None = None, final: bool = False
) -> Any:
    messages = [request.message() for request in requests]
    if final:
        for message in messages:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
    reply = target.stream(messages, metadata)
    answers = [
        {"error": "(some)"} if each.error_message else message_facts(each.infer_response) for each in reply.messages
    ]
    return {"answers": answers, "code": reply.code}


def _echo(number: float, id_: str = "") -> Inference:
    return Inference("echo", (Input("INPUT0", "FP32", (1, 1), (number,)),), id=id_)


def _repeat(number: int, id_: str = "", model: str = "repeat", name: str = "IN") -> Inference:
    return Inference(model, (Input(name, "INT32", (1,), (number,)),), id=id_)


def _steps(model: str, values: Sequence[int], sequence_id: int | str) -> list[Inference]:
    last = len(values) - 1
    return [
        Inference(
            model,
            (Input("INPUT", "INT32", (1, 1), (value,)),),
            id=str(index),
            parameters={"sequence_id": sequence_id, "sequence_start": index == 0, "sequence_end": index == last},
        )
        for index, value in enumerate(values)
    ]


_BAD = Inference("nothing", (Input("INPUT0", "FP32", (1, 1), (1.0,)),), id="bad")

_STREAMS: dict[str, list[Inference]] = {
    "one": [_echo(1)],
    "none": [],
    "three in order": [_echo(number, str(number)) for number in range(3)],
    "an error among others": [_echo(1, "a"), _BAD, _echo(2, "b")],
    "a failing model": [Inference("failing", (Input("INPUT0", "BYTES", (1,), ("raise",)),), id="f"), _echo(1)],
    "decoupled": [_repeat(3, "r")],
    "decoupled without responses": [_repeat(0, "r")],
    "decoupled that fails": [_repeat(-2, "r")],
    "a decoupled ensemble": [_repeat(3, "r", "ensemble_repeat", "N")],
    "a decoupled ensemble without responses": [_repeat(0, "r", "ensemble_repeat", "N")],
    "a sequence": _steps("sequence", (1, 2, 3), 41),
    "a sequence in oldest": _steps("sequence_oldest", (1, 2, 3), 42),
    "a sequence with state": _steps("sequence_state", (1, 2, 3), 43),
    "a sequence begun twice": _steps("sequence", (1, 2, 3), 44)[:2] + _steps("sequence", (5, 6), 44),
    "a sequence after its end": [*_steps("sequence", (1, 2), 45), _steps("sequence", (1, 2, 3), 45)[1]],
}


def _unary_sequence(model: str, sequence_id: int, form: str, target: Target) -> Any:
    return [step.ask(target, form) for step in _steps(model, (3, 4, 5), sequence_id)]


def _http(method: str, path: str, *wanted: str, body: Any = None) -> Callable[[Target], Any]:
    return lambda target: http_facts(target.http(method, path, body), *wanted)


def _call(name: str, message: Any, *wanted: str) -> Callable[[Target], Any]:
    return lambda target: rpc_facts(target.rpc(name, message), *wanted)


_EXTENSIONS: dict[str, Callable[[Target], Any]] = {
    "system regions (http)": _http("GET", "/v2/systemsharedmemory/status"),
    "cuda regions (http)": _http("GET", "/v2/cudasharedmemory/status"),
    "an unknown system region (http)": _http("GET", "/v2/systemsharedmemory/region/r/status"),
    "system regions (grpc)": _call("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
    "cuda regions (grpc)": _call("CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest()),
    "an unknown system region (grpc)": _call(
        "SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(name="r")
    ),
    "trace settings (http)": _http("GET", "/v2/trace/setting"),
    "trace settings (grpc)": _call("TraceSetting", service_pb2.TraceSettingRequest()),
    "trace settings of a model (http)": _http("GET", "/v2/models/echo/trace/setting"),
    "trace settings of a model (grpc)": _call("TraceSetting", service_pb2.TraceSettingRequest(model_name="echo")),
    "trace settings of nothing (http)": _http("GET", "/v2/models/nothing/trace/setting", "nothing"),
    "trace settings of nothing (grpc)": _call(
        "TraceSetting", service_pb2.TraceSettingRequest(model_name="nothing"), "nothing"
    ),
    "a bad trace level (http)": _http("POST", "/v2/trace/setting", "trace_level", body='{"trace_level":["X"]}'),
    "a bad trace rate (http)": _http("POST", "/v2/trace/setting", "trace_rate", body='{"trace_rate":"x"}'),
    "an unknown trace setting (http)": _http("POST", "/v2/trace/setting", "unknown_key", body='{"unknown_key":"x"}'),
    "log settings (http)": _http("GET", "/v2/logging"),
    "log settings (grpc)": _call("LogSettings", service_pb2.LogSettingsRequest()),
    "a bad log level (http)": _http("POST", "/v2/logging", "log_info", body='{"log_info":"x"}'),
    "a bad log format (http)": _http("POST", "/v2/logging", "log_format", body='{"log_format":"x"}'),
    "an unknown log setting (http)": _http("POST", "/v2/logging", "unknown_key", body='{"unknown_key":1}'),
    "a log file (http)": _http("POST", "/v2/logging", "log_file", body='{"log_file":"/tmp/differential.log"}'),
}

_ERROR_METADATA = {"triton_grpc_error": "true"}

CASES = [
    *(Case(f"grpc: {name}", _message(change)) for name, change in _MESSAGES.items()),
    *(
        Case(f"stream: {name}{', final wanted' if final else ''}", partial(_stream, requests, final=final))
        for name, requests in _STREAMS.items()
        for final in (False, True)
    ),
    *(
        Case(
            f"stream: {name}, errors end it",
            partial(_stream, _STREAMS[name], metadata=_ERROR_METADATA),
            deadly="it ends a while later, by a fault in the stream that it ended",
        )
        for name in ("an error among others", "a failing model", "decoupled that fails", "three in order")
    ),
    *(
        Case(f"{model} step by step ({form})", partial(_unary_sequence, model, sequence_id, form))
        for model, sequence_id in (("sequence", 71), ("sequence_oldest", 72), ("sequence_state", 73))
        for form in ("http-json", "grpc-raw")
    ),
    *(Case(f"extension: {name}", ask) for name, ask in _EXTENSIONS.items()),
]

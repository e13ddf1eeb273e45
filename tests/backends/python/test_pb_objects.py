"""Requests, responses and errors of pb_utils, without a child process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from modelserver_backends.python import triton_python_backend_utils as pb_utils

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor as CoreTensor
from modelserver.errors import ErrorCode

SERVER_REQUEST = InFlightRequest(
    model_name="m",
    version=2,
    inputs={"x": CoreTensor("x", Datatype.FP32, np.zeros(2, np.float32))},
    id="r-1",
    parameters={"a": 1, "b": "two", "c": 0.5, "d": True},
    timeout_us=99,
    sequence_id=7,
    sequence_start=True,
    sequence_end=True,
)


def test_a_request_shows_what_the_client_sent() -> None:
    request = pb_utils.InferenceRequest.of(SERVER_REQUEST, ["y", "z"])
    assert [tensor.name() for tensor in request.inputs()] == ["x"]
    assert pb_utils.get_input_tensor_by_name(request, "x") is not None
    assert pb_utils.get_input_tensor_by_name(request, "nope") is None
    assert (request.request_id(), request.correlation_id(), request.timeout(), request.flags()) == ("r-1", 7, 99, 3)
    assert request.parameters() == '{"a":1,"b":"two","c":0.5,"d":true}'
    assert request.requested_output_names() == {"y", "z"}
    assert (request.model_name(), request.model_version()) == ("m", 2)
    assert request.preferred_memory().memory_type() == pb_utils.TRITONSERVER_MEMORY_CPU
    assert request.trace().get_context() is None
    assert request.is_cancelled() is False


def test_the_order_of_arguments_is_tritons() -> None:
    inputs = [pb_utils.Tensor("x", np.zeros(1, np.int32))]
    request = pb_utils.InferenceRequest("id", 7, inputs, ["y"], "other", 3, 1, 99)
    assert (request.request_id(), request.correlation_id(), request.requested_output_names()) == ("id", 7, {"y"})
    assert (request.model_name(), request.model_version(), request.flags(), request.timeout()) == ("other", 3, 1, 99)


@pytest.mark.parametrize("missing", ["inputs", "requested_output_names", "model_name"])
def test_what_a_request_must_have_is_told(missing: str) -> None:
    arguments = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    del arguments[missing]
    with pytest.raises(TypeError, match="needs inputs, requested_output_names and model_name"):
        pb_utils.InferenceRequest(**arguments)


def test_a_model_can_make_requests_of_its_own() -> None:
    request = pb_utils.InferenceRequest(
        model_name="other",
        requested_output_names=["y"],
        inputs=[pb_utils.Tensor("x", np.zeros(1, np.int32))],
        correlation_id="s",
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1),
        parameters={"k": "v"},
    )
    request.set_flags(1)
    assert (request.correlation_id(), request.flags(), request.parameters()) == ("s", 1, '{"k": "v"}')
    assert request.preferred_memory().device_id() == 1
    assert pb_utils.get_input_tensor_by_name(request, "x").triton_dtype() == 8
    with pytest.raises(pb_utils.TritonModelException, match=r"BLS is only supported during the 'execute' function\."):
        request.exec()
    with pytest.raises(TypeError, match="must be Tensor objects"):
        pb_utils.InferenceRequest(model_name="o", requested_output_names=[], inputs=[np.zeros(1)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pb_utils.InferenceRequest.of(SERVER_REQUEST, []).get_response_sender(),
            r"get_response_sender\(\) is for requests that the model is to answer",
        ),
        (lambda: pb_utils.InferenceRequest.of(SERVER_REQUEST, []).exec(), "a request that came to the model"),
        (lambda: pb_utils.InferenceRequest.of(SERVER_REQUEST, []).set_release_flags(4), "unknown release flags 4"),
        (lambda: pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER), "inside a model only"),
        (lambda: pb_utils.load_model("m"), "Failed to load model: possible inside a model only"),
        (lambda: pb_utils.unload_model("m"), "Failed to unload model: possible inside a model only"),
        (lambda: pb_utils.is_model_ready("m"), "Failed to check model readiness: possible inside a model only"),
    ],
)
def test_what_works_inside_a_model_only_says_so(call: Callable[[], object], message: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=message):
        call()


def _made_request(**changes: object) -> object:
    tensor = pb_utils.Tensor("x", np.zeros(1, np.int32))
    return pb_utils.InferenceRequest(
        **{"inputs": [tensor], "requested_output_names": ["y"], "model_name": "m", "request_id": "r", **changes}
    )


@pytest.mark.parametrize(
    "name",
    [
        "inputs",
        "requested_output_names",
        "model_name",
        "request_id",
        "correlation_id",
        "model_version",
        "flags",
        "timeout",
        "preferred_memory",
        "trace",
    ],
)
def test_an_argument_of_a_request_that_is_none_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        _made_request(**{name: None})


@pytest.mark.parametrize(
    "call",
    [
        lambda: _made_request(requested_output_names=[None]),
        lambda: _made_request(requested_output_names="y"),
        lambda: _made_request(flags=1 << 32),
        lambda: _made_request(preferred_memory=1),
        lambda: _made_request(trace="00-1-1-01"),
        lambda: pb_utils.PreferredMemory(1),
        lambda: pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, None),
        lambda: pb_utils.InferenceResponse(None),
        lambda: pb_utils.InferenceResponse(output_tensors=None, error=pb_utils.TritonError("no")),
        lambda: pb_utils.TritonError("no", 2),
        lambda: pb_utils.MetricFamily("n", "d", 0),
        lambda: pb_utils.Logger.log("words", None),
        lambda: pb_utils.Logger.log("words", 1),
        lambda: pb_utils.Logger.log(None),
        lambda: pb_utils.Logger.log_info(None),
        lambda: pb_utils.Logger.log_warn(None),
        lambda: pb_utils.Logger.log_error(None),
        lambda: pb_utils.Logger.log_verbose(1),
        lambda: pb_utils.unload_model("m", None),
    ],
)
def test_an_argument_of_another_type_is_a_type_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _made_request(inputs=[None]),
            r"^Input tensor for request with id 'r' and model name 'm' should not be empty\.$",
        ),
        (
            lambda: _made_request(requested_output_names=["y", ""]),
            r"^Requested output name for request with id 'r' and model name 'm' should not be empty\.$",
        ),
        (lambda: _made_request(correlation_id=1.5), r"^Correlation ID must be integer or string$"),
        (
            lambda: pb_utils.InferenceResponse([None]),
            r"^Output tensor for inference response should not be empty\.$",
        ),
        (lambda: pb_utils.Tensor("", np.zeros(1)), r"^Tensor name cannot be an empty string\.$"),
        (lambda: pb_utils.Tensor.from_dlpack("", None), r"^Tensor name cannot be an empty string\.$"),
        (lambda: pb_utils.load_model("m", "", ["file:1/model.py"]), r"^Failed to load model: files must be a dict"),
    ],
)
def test_an_empty_part_is_refused_in_tritons_words(call: Callable[[], object], message: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=message):
        call()


def test_the_levels_of_the_log_have_tritons_names() -> None:
    levels = pb_utils.Logger.LogLevel
    assert [str(level) for level in levels] == [f"LogLevel.{name}" for name in ("INFO", "WARNING", "ERROR", "VERBOSE")]
    assert pb_utils.Logger.WARNING is levels.WARNING


def test_a_response_holds_tensors_or_an_error() -> None:
    tensor = pb_utils.Tensor("y", np.zeros(1, np.int32))
    response = pb_utils.InferenceResponse([tensor], parameters={"n": 1, "f": 0.5})
    assert pb_utils.get_output_tensor_by_name(response, "y") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "z") is None
    assert (response.has_error(), response.parameters()) == (False, '{"n": 1, "f": 0.5}')
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
    assert failed.has_error()
    assert failed.error().message() == str(failed.error()) == "no"
    assert failed.error().code() == pb_utils.TritonError.INTERNAL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_tensors": [np.zeros(1)]}, "must be pb_utils.Tensor objects, got ndarray"),
        ({"error": "text"}, "must be a pb_utils.TritonError, got str"),
        ({"parameters": [("a", 1)]}, "Expect parameters to have type dict, found type <class 'list'>"),
        ({"parameters": {1: "a"}}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"parameters": {"a": None}}, "values to have type bool/int/float/str, found type <class 'NoneType'>"),
        ({"parameters": {"a": {"b": 1}}}, "found type <class 'dict'>"),
        ({"parameters": {"a": 1 << 64}}, "does not fit 64 bits"),
    ],
)
def test_wrong_arguments_of_a_response_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(pb_utils.TritonModelException if "parameters" in arguments else TypeError) as caught:
        pb_utils.InferenceResponse(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (pb_utils.TritonError.UNKNOWN, ErrorCode.UNKNOWN),
        (pb_utils.TritonError.INTERNAL, ErrorCode.INTERNAL),
        (pb_utils.TritonError.NOT_FOUND, ErrorCode.NOT_FOUND),
        (pb_utils.TritonError.INVALID_ARG, ErrorCode.INVALID_ARGUMENT),
        (pb_utils.TritonError.UNAVAILABLE, ErrorCode.UNAVAILABLE),
        (pb_utils.TritonError.UNSUPPORTED, ErrorCode.UNSUPPORTED),
        (pb_utils.TritonError.ALREADY_EXISTS, ErrorCode.ALREADY_EXISTS),
        (pb_utils.TritonError.CANCELLED, ErrorCode.CANCELLED),
    ],
)
def test_every_error_code_has_its_counterpart(code: int, expected: ErrorCode) -> None:
    error = pb_utils.TritonError("text", code).server_error()
    assert (error.code, error.message) == (expected, "text")


def test_configs_are_searched_by_name() -> None:
    config = {"input": [{"name": "a"}], "output": [{"name": "b"}], "model_transaction_policy": {"decoupled": True}}
    assert pb_utils.get_input_config_by_name(config, "a") == {"name": "a"}
    assert pb_utils.get_output_config_by_name(config, "b") == {"name": "b"}
    assert pb_utils.get_output_config_by_name(config, "a") is None
    assert pb_utils.using_decoupled_model_transaction_policy(config)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_all_names_exist() -> None:
    assert [name for name in pb_utils.__all__ if not hasattr(pb_utils, name)] == []

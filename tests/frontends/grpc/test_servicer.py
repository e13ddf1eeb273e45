from __future__ import annotations

import dataclasses
import gc
import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.echo import EchoControlPlane, EchoModel
from support.grpc_calls import Call, RefusedError, call_unary, turns

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import ErrorCode, ServerError, UnavailableError
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.planes.data import DataPlane
from modelserver.protocol.call import Method
from modelserver.protocol.grpc_status import STATUS_OF, Status
from modelserver.repository.state import IndexEntry, ModelState
from modelserver.telemetry.statistics_snapshot import BatchStat, DurationStat

Methods = Mapping[str, Method]
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def infer_message(model: str = "echo", values: list[float] | None = None, **fields: Any) -> pb.ModelInferRequest:
    data = np.array(values or [1, 2, 3], np.float32)
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[data.tobytes()], **fields)
    request.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    return request


async def refused(methods: Methods, path: str, request: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await call_unary(methods, path, request, pb.ModelInferResponse)
    return caught.value


def test_every_method_of_the_service_is_served(methods: Methods) -> None:
    for method in SERVICE.methods:
        served = methods[f"/{SERVICE.full_name}/{method.name}"]
        assert (served.stream is not None) == method.server_streaming, method.name
        assert (served.unary is not None) != method.server_streaming, method.name


async def test_live_and_ready(methods: Methods, dataplane: DataPlane) -> None:
    assert (await call_unary(methods, "ServerLive", b"", pb.ServerLiveResponse)).live
    assert (await call_unary(methods, "ServerReady", b"", pb.ServerReadyResponse)).ready
    dataplane.begin_shutdown()
    assert (await call_unary(methods, "ServerLive", b"", pb.ServerLiveResponse)).live
    assert not (await call_unary(methods, "ServerReady", b"", pb.ServerReadyResponse)).ready


@pytest.mark.parametrize(
    ("name", "version", "is_ready"), [("echo", "", True), ("echo", "1", True), ("echo", "2", False), ("no", "", False)]
)
async def test_model_ready(methods: Methods, name: str, version: str, is_ready: bool) -> None:
    request = pb.ModelReadyRequest(name=name, version=version)
    assert (await call_unary(methods, "ModelReady", request, pb.ModelReadyResponse)).ready is is_ready


async def test_model_that_is_loading_is_not_ready(methods: Methods, model: EchoModel) -> None:
    model.ready = False
    request = pb.ModelReadyRequest(name="echo")
    assert not (await call_unary(methods, "ModelReady", request, pb.ModelReadyResponse)).ready


async def test_server_metadata(methods: Methods) -> None:
    reply = await call_unary(methods, "ServerMetadata", b"", pb.ServerMetadataResponse)
    assert (reply.name, reply.version) == ("modelserver", "1.2.3")
    assert list(reply.extensions) == ["statistics", "model_configuration"]


async def test_model_metadata(methods: Methods) -> None:
    reply = await call_unary(methods, "ModelMetadata", pb.ModelMetadataRequest(name="echo"), pb.ModelMetadataResponse)
    assert (reply.name, list(reply.versions), reply.platform) == ("echo", ["1"], "echo")
    (given,), (answered,) = reply.inputs, reply.outputs
    assert (given.name, given.datatype, list(given.shape)) == ("INPUT", "FP32", [-1])
    assert (answered.name, answered.datatype, list(answered.shape)) == ("OUTPUT", "FP32", [-1])


async def test_model_config(methods: Methods) -> None:
    config = (
        await call_unary(methods, "ModelConfig", pb.ModelConfigRequest(name="echo"), pb.ModelConfigResponse)
    ).config
    assert (config.name, config.backend, config.input[0].name) == ("echo", "echo", "INPUT")


@pytest.mark.parametrize("path", ["ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"])
@pytest.mark.parametrize(
    ("name", "version", "status"),
    [("no", "", Status.NOT_FOUND), ("echo", "2", Status.NOT_FOUND), ("echo", "v1", Status.INVALID_ARGUMENT)],
)
async def test_unknown_models_and_versions(
    methods: Methods, path: str, name: str, version: str, status: Status
) -> None:
    if path == "ModelInfer":
        request: Any = infer_message(name, model_version=version)
    else:
        request = pb.ModelMetadataRequest(name=name, version=version)
    error = await refused(methods, path, request)
    assert error.status is status
    assert (version or name) in error.message


async def test_statistics_fields_are_those_of_the_snapshot(methods: Methods, model: EchoModel) -> None:
    durations = {
        name: DurationStat(count, 10 * count)
        for count, name in enumerate(
            (
                "success",
                "fail",
                "queue",
                "compute_input",
                "compute_infer",
                "compute_output",
                "cache_hit",
                "cache_miss",
            ),
            start=1,
        )
    }
    batches = {rows: BatchStat(DurationStat(rows, 1), DurationStat(rows, 2), DurationStat(rows, 3)) for rows in (4, 2)}
    snapshot = dataclasses.replace(
        model.statistics.snapshot(),
        **durations,
        inference_count=7,
        execution_count=5,
        last_inference_ms=123,
        batch_stats=batches,
    )
    model.statistics.snapshot = lambda: snapshot  # type: ignore[method-assign]
    request = pb.ModelStatisticsRequest(name="echo")
    (stats,) = (await call_unary(methods, "ModelStatistics", request, pb.ModelStatisticsResponse)).model_stats
    assert (stats.name, stats.version, stats.last_inference) == ("echo", "1", 123)
    assert (stats.inference_count, stats.execution_count) == (7, 5)
    for name, stat in durations.items():
        shown = getattr(stats.inference_stats, name)
        assert (shown.count, shown.ns) == (stat.count, stat.ns), name
    assert [(batch.batch_size, batch.compute_input.ns) for batch in stats.batch_stats] == [(2, 1), (4, 1)]
    assert [(batch.compute_infer.ns, batch.compute_output.ns) for batch in stats.batch_stats] == [(2, 3), (2, 3)]
    assert len(stats.inference_stats.ListFields()) == len(durations)
    assert [(usage.type, usage.id, usage.byte_size) for usage in stats.memory_usage] == [("CPU", 0, 12345)]


async def test_statistics_of_all_models(methods: Methods) -> None:
    reply = await call_unary(methods, "ModelStatistics", b"", pb.ModelStatisticsResponse)
    assert len(reply.model_stats) == 1 + len(Datatype)


@pytest.mark.parametrize("version", ["", "1"])
async def test_infer(methods: Methods, version: str) -> None:
    request = infer_message(id="q", model_version=version, outputs=[{"name": "OUTPUT"}])
    reply = await call_unary(methods, "ModelInfer", request, pb.ModelInferResponse)
    assert (reply.model_name, reply.model_version, reply.id) == ("echo", "1", "q")
    assert (reply.outputs[0].name, reply.raw_output_contents[0]) == ("OUTPUT", request.raw_input_contents[0])


@pytest.mark.parametrize("datatype", Datatype)
async def test_every_datatype_is_echoed(methods: Methods, datatype: Datatype) -> None:
    raw = b"\x01\x00\x00\x00a\x00\x00\x00\x00" if datatype is Datatype.BYTES else bytes(2 * (datatype.itemsize or 0))
    request = pb.ModelInferRequest(model_name=f"echo_{datatype.value}", raw_input_contents=[raw])
    request.inputs.add(name="INPUT", datatype=datatype.value, shape=[2])
    reply = await call_unary(methods, "ModelInfer", request, pb.ModelInferResponse)
    assert (reply.outputs[0].datatype, reply.raw_output_contents[0]) == (datatype.value, raw)


async def test_deadline_reaches_the_request(methods: Methods, model: EchoModel) -> None:
    seen = []
    model.respond = lambda request: [seen.append(request.deadline_ns) or InferResponse()]  # type: ignore[func-returns-value]
    deadline_ns = time.monotonic_ns() + 5 * 10**9
    await call_unary(methods, "ModelInfer", infer_message(), pb.ModelInferResponse, deadline_ns=deadline_ns)
    assert seen == [deadline_ns]


@pytest.mark.parametrize("is_answered", [True, False])
async def test_unavailable_after_the_deadline_is_deadline_exceeded(
    methods: Methods, model: EchoModel, is_answered: bool
) -> None:
    error = UnavailableError("it waited too long")
    if is_answered:
        model.respond = lambda _: [InferResponse(error=error)]
    else:
        model.refuses = error
    with pytest.raises(RefusedError) as caught:
        await call_unary(methods, "ModelInfer", infer_message(), pb.ModelInferResponse, deadline_ns=time.monotonic_ns())
    assert (caught.value.status, caught.value.message) == (
        Status.DEADLINE_EXCEEDED,
        "Deadline Exceeded: it waited too long",
    )


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("is_late", [True, False])
async def test_errors_of_the_model_keep_their_code(
    methods: Methods, model: EchoModel, code: ErrorCode, is_late: bool
) -> None:
    error = ServerError("it broke", code=code)
    if is_late:
        model.respond = lambda _: [InferResponse(error=error)]
    else:
        model.refuses = error
    caught = await refused(methods, "ModelInfer", infer_message())
    assert (caught.status, caught.message) == (STATUS_OF[code], "it broke")


async def test_request_that_does_not_fit_the_model(methods: Methods) -> None:
    request = infer_message()
    request.inputs[0].name = "OTHER"
    error = await refused(methods, "ModelInfer", request)
    assert error.status is Status.INVALID_ARGUMENT
    assert "OTHER" in error.message


async def test_inference_is_refused_while_shutting_down(methods: Methods, dataplane: DataPlane) -> None:
    dataplane.begin_shutdown()
    assert (await refused(methods, "ModelInfer", infer_message())).status is Status.UNAVAILABLE


async def test_more_than_one_response_needs_a_stream(methods: Methods, model: EchoModel) -> None:
    model.is_decoupled = True
    model.respond = lambda _: [InferResponse(is_final=False), InferResponse(is_final=False), InferResponse()]
    error = await refused(methods, "ModelInfer", infer_message())
    assert error.status is Status.UNIMPLEMENTED
    assert "call ModelStreamInfer" in error.message
    assert len(model.cancelled) == 1


@pytest.mark.parametrize("is_late", [True, False])
async def test_unexpected_errors_are_logged_once_and_not_shown(
    methods: Methods, model: EchoModel, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if is_late:
        broken = Tensor("OUTPUT", Datatype.FP32, None)  # type: ignore[arg-type]
        model.respond = lambda _: [InferResponse([broken])]
    else:
        model.refuses = RuntimeError("secret detail")
    with caplog.at_level(logging.ERROR):
        error = await refused(methods, "ModelInfer", infer_message())
    assert error.status is Status.INTERNAL
    assert "secret" not in error.message
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None


async def test_cancel_reaches_the_request(methods: Methods, model: EchoModel) -> None:
    model.holds = True
    call = Call(infer_message().SerializeToString())
    handler = methods["/inference.GRPCInferenceService/ModelInfer"].unary
    assert handler is not None
    handler(call)
    assert call.on_cancel is not None
    call.on_cancel()
    assert (len(model.cancelled), model.held) == (1, [])
    assert call.failure is not None
    assert call.failure[0] == Status.CANCELLED


@pytest.mark.parametrize("name", [method.name for method in SERVICE.methods if not method.server_streaming])
async def test_garbage_is_refused_by_every_method(methods: Methods, name: str) -> None:
    error = await refused(methods, name, b"\xff\xff")
    assert error.status is Status.INVALID_ARGUMENT
    assert f"not a serialized inference.{name}Request" in error.message


async def test_index(methods: Methods, controlplane: EchoControlPlane) -> None:
    controlplane.rows = (
        IndexEntry("a", 1, ModelState.READY),
        IndexEntry("b", 2, ModelState.UNAVAILABLE, "unloaded"),
        IndexEntry("c", None, ModelState.UNKNOWN),
    )
    reply = await call_unary(methods, "RepositoryIndex", b"", pb.RepositoryIndexResponse)
    assert [(row.name, row.version, row.state, row.reason) for row in reply.models] == [
        ("a", "1", "READY", ""),
        ("b", "2", "UNAVAILABLE", "unloaded"),
        ("c", "", "", ""),
    ]
    request = pb.RepositoryIndexRequest(ready=True)
    assert [
        row.name for row in (await call_unary(methods, "RepositoryIndex", request, pb.RepositoryIndexResponse)).models
    ] == ["a"]
    error = await refused(methods, "RepositoryIndex", pb.RepositoryIndexRequest(repository_name="r"))
    assert error.status is Status.UNIMPLEMENTED


@pytest.mark.parametrize(("path", "verb"), [("RepositoryModelLoad", "load"), ("RepositoryModelUnload", "unload")])
class TestLoadAndUnload:
    async def test_name_and_typed_parameters(
        self, methods: Methods, controlplane: EchoControlPlane, path: str, verb: str
    ) -> None:
        request = pb.RepositoryModelLoadRequest(model_name="m")
        request.parameters["config"].string_param = "{}"
        request.parameters["file:1/model.onnx"].bytes_param = b"\x00"
        request.parameters["unload_dependents"].bool_param = False
        request.parameters["n"].int64_param = 3
        await call_unary(methods, path, request, pb.RepositoryModelLoadResponse)
        parameters = {"config": "{}", "file:1/model.onnx": b"\x00", "unload_dependents": False, "n": 3}
        assert controlplane.asked == [(verb, "m", parameters)]

    async def test_name_where_kserve_puts_it(
        self, methods: Methods, controlplane: EchoControlPlane, path: str, verb: str
    ) -> None:
        request = pb.RepositoryModelLoadRequest(repository_name="m")
        await call_unary(methods, path, request, pb.RepositoryModelLoadResponse)
        assert controlplane.asked == [(verb, "m", {})]

    async def test_one_repository_cannot_be_chosen(self, methods: Methods, path: str, verb: str) -> None:
        request = pb.RepositoryModelLoadRequest(repository_name="r", model_name="m")
        assert (await refused(methods, path, request)).status is Status.UNIMPLEMENTED

    async def test_parameter_without_value(self, methods: Methods, path: str, verb: str) -> None:
        request = pb.RepositoryModelLoadRequest(model_name="m")
        request.parameters["config"].Clear()
        error = await refused(methods, path, request)
        assert (error.status, error.message) == (Status.INVALID_ARGUMENT, "parameter 'config' has no value")

    @pytest.mark.parametrize(
        ("reason", "status"), [(UnavailableError("no"), Status.UNAVAILABLE), (OSError("x"), Status.INTERNAL)]
    )
    async def test_failure(
        self,
        methods: Methods,
        controlplane: EchoControlPlane,
        path: str,
        verb: str,
        reason: Exception,
        status: Status,
    ) -> None:
        controlplane.refuses = reason
        request = pb.RepositoryModelLoadRequest(model_name="m")
        assert (await refused(methods, path, request)).status is status

    async def test_client_that_leaves_does_not_stop_it(
        self, methods: Methods, controlplane: EchoControlPlane, path: str, verb: str
    ) -> None:
        message = pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()
        call = Call(message)
        handler = methods[f"/inference.GRPCInferenceService/{path}"].unary
        assert handler is not None
        handler(call)
        assert call.on_cancel is None
        await turns()
        assert controlplane.asked == [(verb, "m", {})]


@pytest.mark.parametrize("kind", ["System", "Cuda"])
async def test_there_are_no_shared_memory_regions(methods: Methods, kind: str) -> None:
    reply_class = getattr(pb, f"{kind}SharedMemoryStatusResponse")
    assert not (await call_unary(methods, f"{kind}SharedMemoryStatus", b"", reply_class)).regions
    reply_class = getattr(pb, f"{kind}SharedMemoryUnregisterResponse")
    assert await call_unary(methods, f"{kind}SharedMemoryUnregister", b"", reply_class)
    request = pb.SystemSharedMemoryStatusRequest(name="r")
    error = await refused(methods, f"{kind}SharedMemoryStatus", request)
    assert (error.status, error.message) == (
        Status.NOT_FOUND,
        f"Unable to find {kind.lower()} shared memory region: 'r'",
    )
    for verb in ("Register", "Unregister"):
        error = await refused(methods, f"{kind}SharedMemory{verb}", request)
        assert error.status is Status.UNIMPLEMENTED
        assert "--allow-client-shm=true" in error.message


@pytest.mark.parametrize("fault", [None, "refused", "too many", "failed"])
async def test_nothing_of_a_request_stays_in_memory_after_its_answer(
    methods: Methods, model: EchoModel, fault: str | None
) -> None:
    responses = {
        "too many": [InferResponse(is_final=False), InferResponse(is_final=False)],
        "failed": [InferResponse(error=UnavailableError("busy"))],
    }
    if fault in responses:
        model.respond = lambda _: responses[str(fault)]
    model.refuses = UnavailableError("the queue is full") if fault == "refused" else None
    inputs: list[weakref.ref[object]] = []
    submit = model.submit

    def note(request: InFlightRequest) -> ResponseStream:
        inputs.append(weakref.ref(request.inputs["INPUT"].data))
        return submit(request)

    model.submit = note  # type: ignore[method-assign]
    gc.disable()
    try:
        call = Call(infer_message().SerializeToString())
        handler = methods["/inference.GRPCInferenceService/ModelInfer"].unary
        assert handler is not None
        handler(call)
        await turns()
        assert (call.parts is not None) is (fault is None)
        call.on_cancel = None  # as wires do
        model.refuses = None  # its traceback holds the request
        responses.clear()
        model.cancelled.clear()
        assert inputs[0]() is None
    finally:
        gc.enable()

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from support.echo import EchoModel
from support.grpc_calls import OpenStream, turns

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import UnavailableError
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.planes.data import DataPlane
from modelserver.protocol.call import Method
from modelserver.protocol.grpc_status import Status

Methods = Mapping[str, Method]
PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
LIMIT = 4  # of the frontend fixture


@pytest.fixture(params=[True, False], ids=["at once", "by the task"], autouse=True)
def _sends_now(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenStream, "sends_now", request.param)


def message(request_id: str, model: str = "echo", **parameters: bool) -> pb.ModelInferRequest:
    data = np.array([1, 2], np.float32)
    request = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[data.tobytes()])
    request.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    for key, value in parameters.items():
        request.parameters[key].bool_param = value
    return request


async def ids(stream: OpenStream, count: int) -> list[str]:
    return [(await stream.receive(pb.ModelStreamInferResponse)).infer_response.id for _ in range(count)]


async def test_request_and_response(methods: Methods) -> None:
    stream = OpenStream(methods[PATH])
    stream.send(message("a"))
    reply = await stream.receive(pb.ModelStreamInferResponse)
    assert reply.error_message == ""
    assert (reply.infer_response.id, reply.infer_response.model_version) == ("a", "1")
    assert reply.infer_response.parameters["triton_final_response"].bool_param is True
    stream.half_close()
    assert await stream.status() == (Status.OK, "")


async def test_responses_come_in_the_order_of_requests(methods: Methods, model: EchoModel) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH])
    for request_id in "abc":
        stream.send(message(request_id))
    await turns()
    assert len(model.held) == 3
    first, second, third = model.held
    for request in (third, second):
        model.release(request)
    await turns()
    assert stream.num_unread == 0
    model.release(first)
    assert await ids(stream, 3) == ["a", "b", "c"]
    await stream.cancel()


async def test_half_close_waits_for_what_is_in_flight(methods: Methods, model: EchoModel) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH])
    stream.send(message("a"))
    stream.half_close()
    await turns()
    assert not stream.task.done()
    model.release(model.held[0])
    assert await ids(stream, 1) == ["a"]
    assert await stream.status() == (Status.OK, "")


async def test_errors_leave_the_stream_open(methods: Methods, model: EchoModel) -> None:
    stream = OpenStream(methods[PATH])
    for request in (message("a"), message("b", "unknown"), message("c", triton_reserved=True), message("d")):
        stream.send(request)
    replies = [await stream.receive(pb.ModelStreamInferResponse) for _ in range(4)]
    assert [reply.infer_response.id for reply in replies] == ["a", "b", "c", "d"]
    assert ["'unknown'" in replies[1].error_message, "reserved" in replies[2].error_message] == [True, True]
    assert [replies[0].error_message, replies[3].error_message] == ["", ""]
    assert all(reply.infer_response.parameters["triton_final_response"].bool_param for reply in replies)
    await stream.cancel()


async def test_late_error_and_garbage(methods: Methods, model: EchoModel) -> None:
    model.respond = lambda _: [InferResponse(error=UnavailableError("queue full"))]
    stream = OpenStream(methods[PATH])
    stream.send(message("a"))
    stream.send(b"\xff")
    replies = [await stream.receive(pb.ModelStreamInferResponse) for _ in range(2)]
    assert replies[0].error_message == "queue full"
    assert "not a serialized inference.ModelInferRequest" in replies[1].error_message
    await stream.cancel()


@pytest.mark.parametrize("value", ["true", "True"])
async def test_real_status_on_demand(methods: Methods, model: EchoModel, value: str) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH], {"triton_grpc_error": value})
    stream.send(message("a"))
    stream.send(message("b", "unknown"))
    stream.send(message("c"))
    await turns()
    held = list(model.held)
    model.release(held[0])
    assert await ids(stream, 1) == ["a"]
    status, text = await stream.status()
    assert status is Status.NOT_FOUND
    assert "'unknown'" in text
    assert model.cancelled == held[1:]


async def test_other_values_keep_errors_in_messages(methods: Methods) -> None:
    stream = OpenStream(methods[PATH], {"triton_grpc_error": "false"})
    stream.send(message("a", "unknown"))
    assert (await stream.receive(pb.ModelStreamInferResponse)).error_message
    await stream.cancel()


async def test_cancel_cancels_what_is_in_flight(methods: Methods, model: EchoModel) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH])
    for request_id in "ab":
        stream.send(message(request_id))
    await turns()
    held = list(model.held)
    await stream.cancel()
    assert (model.cancelled, model.held) == (held, [])


async def test_broken_request_side_ends_the_call(
    methods: Methods, model: EchoModel, caplog: pytest.LogCaptureFixture
) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH])
    stream.send(message("a"))
    stream.break_off(OSError("gone"))
    await turns()
    model.release(model.held[0])
    assert await ids(stream, 1) == ["a"]
    assert (await stream.status())[0] is Status.INTERNAL
    assert [record.exc_info[1].args for record in caplog.records] == [("gone",)]


async def test_requests_in_flight_are_bounded(methods: Methods, model: EchoModel) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH])
    for index in range(LIMIT + 3):
        stream.send(message(str(index)))
    await turns(50)
    assert (stream.num_read, len(model.held)) == (LIMIT, LIMIT)
    model.release(model.held[0])
    await turns(50)
    assert (stream.num_read, len(model.held)) == (LIMIT + 1, LIMIT)
    await stream.cancel()


async def test_slow_reader_holds_the_requests_back(methods: Methods, model: EchoModel) -> None:
    stream = OpenStream(methods[PATH])
    stream.has_room.clear()
    for index in range(LIMIT + 3):
        stream.send(message(str(index)))
    await turns(50)
    assert stream.num_read == LIMIT
    stream.has_room.set()
    assert await ids(stream, LIMIT + 3) == [str(index) for index in range(LIMIT + 3)]
    await stream.cancel()


@pytest.mark.parametrize(("wants_it", "finals"), [(False, [False, False]), (True, [False, False, True])])
async def test_empty_final_response_is_sent_on_demand(
    methods: Methods, model: EchoModel, wants_it: bool, finals: list[bool]
) -> None:
    model.respond = lambda _: [InferResponse(is_final=False), InferResponse(is_final=False), InferResponse()]
    stream = OpenStream(methods[PATH])
    stream.send(message("a", triton_enable_empty_final_response=wants_it))
    stream.half_close()
    assert await stream.status() == (Status.OK, "")
    replies = [await stream.receive(pb.ModelStreamInferResponse) for _ in range(stream.num_unread)]
    assert [reply.infer_response.parameters["triton_final_response"].bool_param for reply in replies] == finals


async def test_drain_answers_what_is_in_flight_and_ends(
    frontend: GrpcFrontend, dataplane: DataPlane, model: EchoModel
) -> None:
    model.holds = True
    idle, busy = (OpenStream(frontend.methods[PATH]) for _ in range(2))
    busy.send(message("a"))
    await turns()
    dataplane.begin_shutdown()
    frontend.drain()
    assert (await idle.status())[0] is Status.UNAVAILABLE
    assert not busy.task.done()
    model.release(model.held[0])
    assert await ids(busy, 1) == ["a"]
    status, text = await busy.status()
    assert status is Status.UNAVAILABLE
    assert "shutting down" in text


async def test_no_new_stream_while_draining(frontend: GrpcFrontend) -> None:
    frontend.drain()
    assert (await OpenStream(frontend.methods[PATH]).status())[0] is Status.UNAVAILABLE


async def test_nothing_is_left_of_a_stream(methods: Methods) -> None:
    before = asyncio.all_tasks()
    stream = OpenStream(methods[PATH])
    stream.send(message("a"))
    await stream.receive(pb.ModelStreamInferResponse)
    await stream.cancel()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("is_refused", [False, True])
async def test_nothing_of_a_request_stays_in_memory_after_its_answer(
    methods: Methods, model: EchoModel, is_refused: bool
) -> None:
    model.holds = not is_refused
    inputs: list[weakref.ref[object]] = []
    submit = model.submit

    def refuse(request: InFlightRequest) -> ResponseStream:
        inputs.append(weakref.ref(request.inputs["INPUT"].data))
        if is_refused:
            raise UnavailableError("the queue is full")
        return submit(request)

    model.submit = refuse  # type: ignore[method-assign]
    stream = OpenStream(methods[PATH])
    gc.disable()
    try:
        for request_id in "ab":
            stream.send(message(request_id))
            await turns()
            if not is_refused:
                model.release(model.held[0])
            await stream.receive(pb.ModelStreamInferResponse)
        await turns()
        # The reader may still hold the last message.
        assert inputs[0]() is None
    finally:
        gc.enable()
    await stream.cancel()


async def test_order_holds_while_room_comes_and_goes(methods: Methods, model: EchoModel) -> None:
    model.holds = True
    stream = OpenStream(methods[PATH])
    expected: list[str] = []
    for index in range(12):
        stream.send(message(str(index)))
        expected.append(str(index))
        await turns()
        if index % 3 == 0:
            stream.has_room.clear()
        model.release(model.held[-1])
        await turns(index % 4)
        stream.has_room.set()
    assert await ids(stream, len(expected)) == expected
    stream.half_close()
    assert await stream.status() == (Status.OK, "")

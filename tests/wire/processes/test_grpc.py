"""gRPC over front processes, by grpcio's client: calls, streams, deadlines, and a server that stops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from support.echo import EchoModel
from support.fronted import Fronted, fronted
from support.wires import HOST

from modelserver.pb import grpc_service_pb2 as pb

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
WATCH = "/grpc.health.v1.Health/Watch"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(scope="module")
def served() -> Iterator[Fronted]:
    with fronted() as made:
        yield made


@pytest.fixture
async def channel(served: Fronted) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(served) as made:
        yield made


def connect(served: Fronted, port: int = 0) -> grpc.aio.Channel:
    # Channels of one process share connections unless told otherwise.
    options = [*UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"{HOST}:{port or served.port}", options)


def request(values: Any, **fields: Any) -> pb.ModelInferRequest:
    data = np.asarray(values, np.float32)
    made = pb.ModelInferRequest(model_name="echo", raw_input_contents=[data.tobytes()], **fields)
    made.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    return made


async def infer(channel: grpc.aio.Channel, message: pb.ModelInferRequest, **details: Any) -> pb.ModelInferResponse:
    call = channel.unary_unary(INFER)
    return pb.ModelInferResponse.FromString(await call(message.SerializeToString(), **details))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/inference.GRPCInferenceService/ServerLive", pb.ServerLiveRequest()),
        ("/inference.GRPCInferenceService/ModelMetadata", pb.ModelMetadataRequest(name="echo")),
        ("/inference.GRPCInferenceService/ModelConfig", pb.ModelConfigRequest(name="none")),
        ("/inference.GRPCInferenceService/RepositoryIndex", pb.RepositoryIndexRequest()),
        ("/inference.GRPCInferenceService/TraceSetting", pb.TraceSettingRequest()),
        ("/inference.GRPCInferenceService/Nothing", pb.TraceSettingRequest()),
        ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service="echo")),
        (INFER, pb.ModelInferRequest(model_name="none")),
        (INFER, pb.ModelInferRequest(model_name="echo")),
        (INFER, request([[1, 2], [3, 4]])),
        (INFER, request([1, 2], id="a")),
    ],
)
async def test_fronts_reply_as_a_lone_server_does(served: Fronted, path: str, message: Any) -> None:
    outcomes = []
    for port in (served.port, served.alone.port):
        async with connect(served, port) as channel:
            try:
                outcomes.append(await channel.unary_unary(path)(message.SerializeToString()))
            except grpc.aio.AioRpcError as error:
                outcomes.append((error.code(), error.details()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("size", [0, 1, 10_000, MIB // 4, 8 * MIB])
async def test_tensors_of_every_size_come_back(channel: grpc.aio.Channel, size: int) -> None:
    message = request(np.random.default_rng(size).random(size, np.float32))
    for _ in range(3):
        reply = await infer(channel, message)
        assert reply.raw_output_contents[0] == message.raw_input_contents[0]


async def test_many_calls_at_once_get_their_own_replies(served: Fronted) -> None:
    async def run(number: int) -> None:
        async with connect(served) as channel:
            sizes = np.random.default_rng(number).integers(1, 20_000, 20)
            messages = [request(np.full(size, number + size), id=str(index)) for index, size in enumerate(sizes)]
            for message, reply in zip(
                messages, await asyncio.gather(*(infer(channel, m) for m in messages)), strict=True
            ):
                assert (reply.id, reply.raw_output_contents[0]) == (message.id, message.raw_input_contents[0])

    await asyncio.gather(*(run(number) for number in range(8)))


async def test_a_thousand_requests_on_one_stream(channel: grpc.aio.Channel) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for number in range(1000):
            yield request([number] * (number % 50 + 1), id=str(number)).SerializeToString()

    number = 0
    async for raw in channel.stream_stream(STREAM)(messages()):
        reply = pb.ModelStreamInferResponse.FromString(raw)
        assert (reply.error_message, reply.infer_response.id) == ("", str(number))
        number += 1
    assert number == 1000


async def test_readiness_is_watched(served: Fronted, channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(WATCH)(health_pb2.HealthCheckRequest(service="echo").SerializeToString())
    model = served.models["echo"]

    async def status() -> int:
        return health_pb2.HealthCheckResponse.FromString(await call.read()).status

    assert await status() == health_pb2.HealthCheckResponse.SERVING
    model.ready = False
    assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
    model.ready = True
    assert await status() == health_pb2.HealthCheckResponse.SERVING
    call.cancel()


async def test_deadlines_and_cancels_reach_the_core() -> None:
    model = EchoModel(holds=True)
    with fronted(model, num_fronts=1) as served:
        async with connect(served) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(channel, request([1]), timeout=1.0)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            served.until(lambda: len(model.cancelled) == 1, "the late call is cancelled")
            call = channel.unary_unary(INFER)(request([1]).SerializeToString())
            await asyncio.to_thread(served.until, lambda: len(model.held) == 1, "the second is in the model")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            served.until(lambda: len(model.cancelled) == 2, "it is cancelled")
        served.until(lambda: served.counts.open_streams == 0, "no stream is open")


async def test_a_killed_front_ends_its_calls_as_unavailable() -> None:
    model = EchoModel(holds=True)
    with fronted(model, num_fronts=1) as served:
        async with connect(served) as channel:
            call = asyncio.ensure_future(infer(channel, request([1])))
            await asyncio.to_thread(served.until, lambda: len(model.held) == 1, "it is in the model")
            pid = served.gauges[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            model.holds = False
        async with connect(served) as channel:
            await infer(channel, request([1]), wait_for_ready=True, timeout=20)


async def test_a_stop_finishes_calls_and_ends_streams() -> None:
    model = EchoModel(holds=True)
    with fronted(model, num_fronts=2) as served:
        async with connect(served) as first, connect(served) as second:
            call = asyncio.ensure_future(infer(first, request([1])))
            watch = second.unary_stream(WATCH)(health_pb2.HealthCheckRequest().SerializeToString())
            await watch.read()
            await asyncio.to_thread(served.until, lambda: len(model.held) == 1, "it is in the model")
            stopping = asyncio.run_coroutine_threadsafe(served.processes.stop(10.0), served.loop)
            assert await watch.read() is grpc.aio.EOF
            served.call(lambda: model.release(model.held[0]))
            assert (await call).raw_output_contents[0] == np.float32([1]).tobytes()
            await asyncio.wrap_future(stopping)

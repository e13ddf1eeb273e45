"""The grpcio wire over real sockets, with grpcio's own clients."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.echo import EchoControlPlane, EchoModel, echo_dataplane

from modelserver.app.frontends import grpc_frontend
from modelserver.errors import UnavailableError
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.planes.data import DataPlane
from modelserver.protocol.call import Method, UnaryCall
from modelserver.wire.address import Address
from modelserver.wire.limits import KeepaliveLimits, WireLimits
from modelserver.wire.reference.grpcio_server import GrpcioServer, channel_arguments

HOST = "127.0.0.1"
NOT_SERVING = health_pb2.HealthCheckResponse(status="NOT_SERVING").SerializeToString()
SERVICE = "/inference.GRPCInferenceService/"


class Running:
    """A served data plane and a channel to it."""

    def __init__(self, dataplane: DataPlane, server: GrpcioServer, channel: grpc.aio.Channel) -> None:
        self.dataplane = dataplane
        self.server = server
        self.channel = channel
        self.infer = channel.unary_unary(f"{SERVICE}ModelInfer", None, pb.ModelInferResponse.FromString)
        self.stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer", None, pb.ModelStreamInferResponse.FromString)


@asynccontextmanager
async def serving(
    *models: EchoModel, limits: WireLimits | None = None, reuse_port: bool = False
) -> AsyncIterator[Running]:
    dataplane = echo_dataplane(*models)
    frontend = grpc_frontend(dataplane, EchoControlPlane(), health_watch_interval_s=0.01)  # type: ignore[arg-type]
    server = GrpcioServer(frontend, Address(HOST, 0, "--grpc-port", reuse_port), limits)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(
            f"{HOST}:{server.port}", options=[("grpc.max_receive_message_length", -1)]
        ) as channel:
            yield Running(dataplane, server, channel)
    finally:
        await server.stop(1)


def message(size: int = 4, request_id: str = "", value: float = 0.0) -> bytes:
    data = np.full(size, value, np.float32)
    request = pb.ModelInferRequest(model_name="echo", id=request_id, raw_input_contents=[data.tobytes()])
    request.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    return request.SerializeToString()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the client or the server
            await asyncio.sleep(0.005)


async def test_infer() -> None:
    async with serving(EchoModel()) as running:
        reply = await running.infer(message(request_id="q"))
        assert (reply.id, len(reply.raw_output_contents[0])) == ("q", 16)


async def test_large_messages_pass_both_ways() -> None:
    async with serving(EchoModel()) as running:
        reply = await running.infer(message(4 << 20, value=1.5))
        assert np.frombuffer(reply.raw_output_contents[0], np.float32).sum() == 1.5 * (4 << 20)


async def test_error_status_and_text() -> None:
    async with serving(EchoModel("other")) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.infer(message())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "Request for unknown model: 'echo' is not found"


async def test_error_text_may_be_long_and_not_ascii() -> None:
    model = EchoModel()
    model.refuses = UnavailableError("m\u00e4h\n" * 5000)
    async with serving(model) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.infer(message())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details().startswith("m\u00e4h\nm\u00e4h\n")
        assert caught.value.details().endswith("more characters)")


async def test_unknown_method_is_unimplemented() -> None:
    async with serving() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.channel.unary_unary(f"{SERVICE}NoSuch")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_hundred_at_once() -> None:
    async with serving(EchoModel()) as running:
        replies = await asyncio.gather(*(running.infer(message(value=index)) for index in range(100)))
        values = [np.frombuffer(reply.raw_output_contents[0], np.float32)[0] for reply in replies]
        assert values == list(range(100))


async def test_client_cancel_cancels_the_request_alone() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        calls = [running.infer(message(request_id=str(index))) for index in range(3)]
        await until(lambda: len(model.held) == 3)
        calls[1].cancel()
        await until(lambda: model.cancelled)
        assert [request.id for request in model.cancelled] == [await _id_of(calls[1], model)]
        for request in list(model.held):
            model.release(request)
        assert {(await calls[0]).id, (await calls[2]).id} == {"0", "2"}


async def _id_of(call: Any, model: EchoModel) -> str:
    with pytest.raises(asyncio.CancelledError):
        await call
    return model.cancelled[0].id


async def test_cancel_after_the_answer_does_nothing() -> None:
    model = EchoModel()
    async with serving(model) as running:
        call = running.infer(message())
        await call
        assert not call.cancel()
        assert model.cancelled == []


async def test_deadline_reaches_the_request_and_cancels_it() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        before_ns = time.monotonic_ns()
        call = running.infer(message(), timeout=2.0)
        await until(lambda: model.held)
        deadline_ns = model.held[0].deadline_ns
        assert deadline_ns is not None
        assert deadline_ns - before_ns > 10**9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: model.cancelled)


async def test_handlers_see_the_metadata() -> None:
    seen: list[Mapping[str, Any]] = []

    def handle(call: UnaryCall) -> None:
        seen.append(call.metadata)
        call.reply((f"{call.metadata['key']} {sorted(call.metadata)} {len(call.metadata)}".encode(),))

    server = GrpcioServer(_Frontend({"/s/m": Method(unary=handle)}), Address(HOST, 0))
    await server.start()
    async with grpc.aio.insecure_channel(f"{HOST}:{server.port}") as channel:
        reply = await channel.unary_unary("/s/m")(b"", metadata=(("key", "a"), ("key", "b"), ("bin-bin", b"\x00")))
    await server.stop(1)
    assert reply == b"b ['bin-bin', 'key', 'user-agent'] 3"
    assert seen[0]["bin-bin"] == b"\x00"


class _Frontend:
    def __init__(self, methods: Mapping[str, Method]) -> None:
        self.methods = methods

    def drain(self) -> None:
        """Nothing is open for longer than a call."""


async def test_no_deadline_without_a_timeout() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        call = running.infer(message())
        await until(lambda: model.held)
        assert model.held[0].deadline_ns is None
        call.cancel()
        await until(lambda: model.cancelled)


async def test_broken_connection_cancels_its_requests() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        async with grpc.aio.insecure_channel(f"{HOST}:{running.server.port}") as channel:
            calls = [channel.unary_unary(f"{SERVICE}ModelInfer")(message()) for _ in range(5)]
            stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")()
            await stream.write(message())
            await until(lambda: len(model.held) == 6)
        await until(lambda: len(model.cancelled) == 6)
        assert all(call.done() for call in calls)


async def test_stream() -> None:
    async with serving(EchoModel()) as running:
        stream = running.stream()
        for index in range(20):
            await stream.write(message(request_id=str(index)))
        await stream.done_writing()
        assert [reply.infer_response.id async for reply in stream] == [str(index) for index in range(20)]
        assert await stream.code() is grpc.StatusCode.OK


async def test_stream_status_on_demand() -> None:
    async with serving(EchoModel("other")) as running:
        stream = running.stream(metadata=(("triton_grpc_error", "true"),))
        await stream.write(message())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stream_cancel() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        stream = running.stream()
        await stream.write(message())
        await until(lambda: model.held)
        stream.cancel()
        await until(lambda: model.cancelled)


async def test_stop_lets_calls_finish_and_ends_idle_streams() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        stream = running.stream()
        watch = running.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        await watch.read()
        call = running.infer(message(request_id="q"))
        await until(lambda: model.held)
        running.dataplane.begin_shutdown()
        stopping = asyncio.create_task(running.server.stop(30))
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert await watch.read() == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        model.release(model.held[0])
        assert (await call).id == "q"
        await asyncio.wait_for(stopping, 60)


async def test_stop_cancels_what_outlives_the_grace() -> None:
    model = EchoModel(holds=True)
    async with serving(model) as running:
        call = running.infer(message())
        await until(lambda: model.held)
        await asyncio.wait_for(running.server.stop(0.05), 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        await until(lambda: model.cancelled)


async def test_stop_twice_and_without_start() -> None:
    async with serving() as running:
        await running.server.stop(0)
        await running.server.stop(0)


async def test_busy_port_is_named_with_its_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind((HOST, 0))
        busy.listen()
        port = busy.getsockname()[1]
        frontend = grpc_frontend(echo_dataplane(), EchoControlPlane())  # type: ignore[arg-type]
        server = GrpcioServer(frontend, Address(HOST, port, "--grpc-port"))
        with pytest.raises(UnavailableError, match=rf"Socket '{HOST}:{port}' already in use; .*--grpc-port"):
            await server.start()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
async def test_impossible_address_is_named_with_its_flag(host: str) -> None:
    frontend = grpc_frontend(echo_dataplane(), EchoControlPlane())  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=f"{host}:1234.*--grpc-address"):
        await GrpcioServer(frontend, Address(host, 1234, "--grpc-port")).start()


@pytest.mark.parametrize("reuse_port", [True, False])
async def test_two_servers_share_a_port_only_if_asked(reuse_port: bool) -> None:
    async with serving(reuse_port=reuse_port) as running:
        frontend = grpc_frontend(echo_dataplane(), EchoControlPlane())  # type: ignore[arg-type]
        second = GrpcioServer(frontend, Address(HOST, running.server.port, "--grpc-port", reuse_port))
        if reuse_port:
            await second.start()
            assert second.port == running.server.port
            await second.stop(0)
        else:
            with pytest.raises(UnavailableError):
                await second.start()


async def test_size_limit_is_the_callers_fault() -> None:
    async with serving(EchoModel(), limits=WireLimits(max_message_bytes=1000)) as running:
        await running.infer(message(16))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.infer(message(1000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("level", "is_smaller"), [("none", False), ("low", True), ("medium", True), ("high", True)])
async def test_response_compression(level: str, is_smaller: bool) -> None:
    size = 1 << 18
    limits = WireLimits(grpc_compression=level)
    async with serving(EchoModel(), limits=limits) as running, _counting_proxy(running.server.port) as proxy:
        async with grpc.aio.insecure_channel(f"{HOST}:{proxy.port}") as channel:
            reply = await channel.unary_unary(f"{SERVICE}ModelInfer")(message(size))
        assert pb.ModelInferResponse.FromString(reply).raw_output_contents[0] == bytes(4 * size)
        await proxy.closed()
        assert (proxy.num_bytes_back < size) is is_smaller


async def test_compressed_requests_are_read() -> None:
    async with serving(EchoModel()) as running:
        reply = await running.infer(message(10_000, value=2), compression=grpc.Compression.Gzip)
        assert len(reply.raw_output_contents[0]) == 40_000


class _Proxy:
    """Forwards TCP connections to `target` and counts what comes back."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_bytes_back = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_server makes a task for each connection"
        self._connections.add(task)
        back_reader, back_writer = await asyncio.open_connection(HOST, self._target)
        await asyncio.gather(self._pump(reader, back_writer), self._pump_back(back_reader, writer))

    async def closed(self) -> None:
        await asyncio.gather(*self._connections)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        num_bytes = 0
        while data := await reader.read(1 << 16):
            num_bytes += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        return num_bytes

    async def _pump_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_bytes_back += await self._pump(reader, writer)


@asynccontextmanager
async def _counting_proxy(target: int) -> AsyncIterator[_Proxy]:
    proxy = _Proxy(target)
    server = await asyncio.start_server(proxy.forward, HOST, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy


def test_options_are_tritons_channel_arguments() -> None:
    arguments = dict(channel_arguments(WireLimits()))
    assert arguments == {
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": (1 << 31) - 1,
        "grpc.max_send_message_length": (1 << 31) - 1,
        "grpc.keepalive_time_ms": 7_200_000,
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.http2.max_pings_without_data": 2,
        "grpc.http2.min_ping_interval_without_data_ms": 300_000,
        "grpc.http2.max_ping_strikes": 2,
    }
    aged = dict(channel_arguments(WireLimits(keepalive=KeepaliveLimits(max_age_s=0.005, max_age_grace_s=0.006))))
    assert (aged["grpc.max_connection_age_ms"], aged["grpc.max_connection_age_grace_ms"]) == (5, 6)


async def test_reflection_lists_and_describes_the_services() -> None:
    def reflect(port: int) -> tuple[list[str], str]:
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("inference.ModelInferRequest")
            return list(database.get_services()), file.name

    async with serving() as running:
        services, file = await asyncio.to_thread(reflect, running.server.port)
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} < set(services)
    assert file == "grpc_service.proto"


async def test_start_and_stop_many_times(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = len(asyncio.all_tasks())
    for _ in range(20):
        async with serving(EchoModel()) as running:
            await running.infer(message())
    await until(lambda: len(asyncio.all_tasks()) == tasks)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr().err == ""


# Client and server in one process, each on its own loop: grpcio's poller belongs to the process.
TWO_LOOPS = """
import asyncio, threading, sys
import grpc.aio
from support.echo import EchoControlPlane, EchoModel, echo_dataplane
from modelserver.protocol.call import Method, UnaryCall
from modelserver.app.frontends import grpc_frontend
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.wire.address import Address
from modelserver.wire.reference.grpcio_server import GrpcioServer

ready, done = threading.Event(), threading.Event()

async def serve():
    global port
    server = GrpcioServer(grpc_frontend(echo_dataplane(EchoModel()), EchoControlPlane()), Address("127.0.0.1", 0))
    await server.start()
    port = server.port
    ready.set()
    while not done.is_set():
        await asyncio.sleep(0.01)
    await server.stop(1)

async def ask():
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        for _ in range(50):
            await asyncio.gather(*(live(b"") for _ in range(20)))

for _ in range(3):
    ready.clear(), done.clear()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    asyncio.run(ask())
    done.set()
    thread.join()
"""


def test_server_and_client_on_two_loops_print_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", TWO_LOOPS], capture_output=True, text=True, timeout=60, env=_path_of_tests()
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def _path_of_tests() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

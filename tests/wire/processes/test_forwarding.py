"""What a front hands to the core whole, and what it serves itself: answered as the core's own frontends answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.echo import EchoControlPlane, EchoModel
from support.fronts import hop, until
from support.grpc_calls import Call, OpenStream, RefusedError, call_unary
from support.http_calls import Exchange, ask, binary_body, fp32, json_body

from modelserver.core.datatype import Datatype
from modelserver.errors import UnavailableError
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.response import HttpResponse
from modelserver.wire.processes.link import WINDOW_PIECES

HEALTH = "/grpc.health.v1.Health"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v2", b""),
        ("HEAD", "/v2", b""),
        ("GET", "/v2/health/live", b""),
        ("GET", "/v2/health/ready", b""),
        ("GET", "/v2/models/echo", b""),
        ("GET", "/v2/models/echo/config", b""),
        ("GET", "/v2/models/echo/stats", b""),
        ("GET", "/v2/models/none/ready", b""),
        ("POST", "/v2/repository/index", b""),
        ("POST", "/v2/repository/index", b"{"),
        ("POST", "/v2/repository/models/echo/load", b"{}"),
        ("GET", "/v2/models/echo/infer", b""),
        ("POST", "/v2/models/none/infer", b"{}"),
        ("POST", "/v2/models/echo/versions/x/infer", b"{}"),
        ("POST", "/v2/models/echo/infer", b"nonsense"),
        ("POST", "/infer", b""),
        ("GET", "/v2/n\N{SNOWMAN}wher\u00e9", b""),
        ("POST", "/v2/models/echo/infer", json_body("INPUT", "FP32", [2], [1, 2], id="x")),
        ("POST", "/v2/models/echo/infer/", json_body("INPUT", "FP32", [2], [1, 2])),
        ("POST", "/v2/models/echo/infer", json_body("INPUT", "FP32", [2], [1])),
    ],
)
async def test_a_front_answers_as_the_core_would(method: str, path: str, body: bytes) -> None:
    async with hop(EchoModel()) as over:
        assert over.local.http is not None
        assert await ask(over.core.http, method, path, body) == await ask(over.local.http, method, path, body)


async def test_binary_tensors_are_decoded_and_encoded_in_the_front() -> None:
    async with hop(EchoModel()) as over:
        body, headers = binary_body([fp32("INPUT", np.arange(MIB // 4))], outputs=[binary("OUTPUT")])
        answer = await ask(over.core.http, "POST", "/v2/models/echo/infer", body, headers)
        assert answer.status == 200
        assert answer.blobs == np.arange(MIB // 4, dtype=np.float32).tobytes()


def binary(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"binary_data": True}}


@pytest.mark.parametrize("length", ["0", "00"])
async def test_raw_bodies_go_to_the_core_which_knows_the_config(length: str) -> None:
    async with hop(EchoModel()) as over:
        body = np.float32([1, 2, 3]).tobytes()
        headers = {"inference-header-content-length": length}
        answer = await ask(over.core.http, "POST", "/v2/models/echo/infer", body, headers)
        assert (answer.status, answer.blobs) == (200, body)


async def test_files_of_megabytes_reach_the_control_plane() -> None:
    control = EchoControlPlane()
    async with hop(control=control) as over:
        parameters = {"config": "{}", "file:1/model.bin": "A" * (3 * MIB)}
        body = json.dumps({"parameters": parameters}).encode()
        answer = await ask(over.core.http, "POST", "/v2/repository/models/new/load", body)
        assert answer.status == 200
        assert control.asked == [("load", "new", parameters)]


class Replier(HttpHandler):
    """A frontend whose answers a test gives."""

    def __init__(self) -> None:
        self.exchanges: list[HttpExchange] = []

    def handle(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)

    async def next(self) -> HttpExchange:
        await until(lambda: bool(self.exchanges))
        return self.exchanges.pop()


async def test_large_answers_cross() -> None:
    replier = Replier()
    async with hop(http=replier) as over:
        exchange = Exchange("GET", "/v2/x?y", {"a": "b"}, b"body")
        exchange.head.query = "q=1"
        over.core.http.handle(exchange)
        asked = await replier.next()
        assert (asked.head.method, asked.head.path, asked.head.query) == ("GET", "/v2/x?y", "q=1")
        assert (asked.head.headers, bytes(asked.body)) == ({"a": "b"}, b"body")
        asked.respond(HttpResponse(207, [("x", "y"), ("x", "z")], (b"a" * MIB, memoryview(b"b"))))
        await exchange.answer()
        (response,) = exchange.responses
        assert (response.status, response.headers) == (207, [("x", "y"), ("x", "z")])
        assert b"".join(response.body) == b"a" * MIB + b"b"


async def test_a_client_that_leaves_is_told_to_the_handler() -> None:
    replier = Replier()
    async with hop(http=replier) as over:
        exchange = Exchange("GET", "/v2/x")
        over.core.http.handle(exchange)
        asked = await replier.next()
        left = asyncio.Event()
        asked.on_disconnect = left.set
        assert exchange.on_disconnect is not None
        exchange.on_disconnect()
        await asyncio.wait_for(left.wait(), 60)
        asked.respond(HttpResponse(200))


class Reader(Exchange):
    """Takes an answer piece by piece, as long as `has_room` is set."""

    def __init__(self) -> None:
        super().__init__("GET", "/v2/events")
        self.pieces: list[bytes] = []
        self.started: tuple[int, list[tuple[str, str]]] | None = None
        self.is_closed = False
        self.is_gone = False
        self.has_room = asyncio.Event()
        self.has_room.set()

    def start(self, status: int, headers: list[tuple[str, str]]) -> Any:
        self.started = (status, headers)
        return self

    async def write(self, data: Any) -> None:
        await self.has_room.wait()
        if self.is_gone:
            raise ConnectionResetError
        self.pieces.append(bytes(data))

    async def close(self) -> None:
        self.is_closed = True


async def test_events_cross_in_order_to_their_end() -> None:
    replier = Replier()
    async with hop(http=replier) as over:
        reader = Reader()
        over.core.http.handle(reader)
        writer = (await replier.next()).start(200, [("Content-Type", "text/event-stream")])
        sent = [b"%d" % number * (number * 300) for number in range(3 * WINDOW_PIECES)]
        for piece in sent:
            await writer.write(piece)
        await writer.close()
        await until(lambda: reader.is_closed)
        assert reader.started == (200, [("Content-Type", "text/event-stream")])
        assert reader.pieces == sent


async def test_a_slow_reader_stops_the_writer() -> None:
    replier = Replier()
    async with hop(http=replier) as over:
        reader = Reader()
        over.core.http.handle(reader)
        writer = (await replier.next()).start(200, [])
        reader.has_room.clear()
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(100):
                await writer.write(b"x")
                written += 1
            await writer.close()

        task = asyncio.ensure_future(write())
        await until(lambda: written >= WINDOW_PIECES)
        await asyncio.sleep(0.05)
        assert written == WINDOW_PIECES
        reader.has_room.set()
        await task
        await until(lambda: reader.is_closed)
        assert len(reader.pieces) == 100


async def test_a_reader_that_leaves_ends_the_writer() -> None:
    replier = Replier()
    async with hop(http=replier) as over:
        reader = Reader()
        over.core.http.handle(reader)
        writer = (await replier.next()).start(200, [])
        reader.is_gone = True

        async def write() -> None:
            while True:
                await writer.write(b"x")

        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(write(), 60)
        await writer.close()


# gRPC.


@pytest.mark.parametrize(
    ("path", "request_message", "reply"),
    [
        ("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse),
        ("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse),
        ("ModelMetadata", pb.ModelMetadataRequest(name="echo"), pb.ModelMetadataResponse),
        ("ModelMetadata", pb.ModelMetadataRequest(name="none"), pb.ModelMetadataResponse),
        ("ModelConfig", pb.ModelConfigRequest(name="echo"), pb.ModelConfigResponse),
        ("ModelConfig", b"\xff", pb.ModelConfigResponse),
        ("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m"), pb.RepositoryModelLoadResponse),
        ("TraceSetting", pb.TraceSettingRequest(), pb.TraceSettingResponse),
        ("ModelInfer", pb.ModelInferRequest(model_name="none"), pb.ModelInferResponse),
        ("ModelInfer", b"\xff", pb.ModelInferResponse),
        (f"{HEALTH}/Check", health_pb2.HealthCheckRequest(service="echo"), health_pb2.HealthCheckResponse),
        (f"{HEALTH}/Check", health_pb2.HealthCheckRequest(service="none"), health_pb2.HealthCheckResponse),
    ],
)
async def test_a_front_replies_as_the_core_would(path: str, request_message: Any, reply: Any) -> None:
    async with hop(EchoModel()) as over:
        assert over.local.grpc is not None
        replies = [
            await outcome(methods, path, request_message, reply)
            for methods in (over.core.grpc.methods, over.local.grpc.methods)
        ]
        assert replies[0] == replies[1]


async def outcome(methods: Mapping[str, Method], path: str, message: Any, reply: Any) -> Any:
    try:
        return await call_unary(methods, path, message, reply)
    except RefusedError as error:
        return error.status, error.message


def infer_request(values: Any, **fields: Any) -> pb.ModelInferRequest:
    data = np.asarray(values, np.float32)
    made = pb.ModelInferRequest(model_name="echo", raw_input_contents=[data.tobytes()], **fields)
    made.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    return made


@pytest.mark.parametrize("size", [1, MIB])
async def test_inference_over_grpc(size: int) -> None:
    async with hop(EchoModel()) as over:
        asked = infer_request(np.arange(size), id="x")
        reply = await call_unary(over.core.grpc.methods, "ModelInfer", asked, pb.ModelInferResponse)
        assert (reply.model_name, reply.model_version, reply.id) == ("echo", "1", "x")
        assert reply.raw_output_contents[0] == asked.raw_input_contents[0]


async def test_streams_of_inference_are_the_fronts_own() -> None:
    async with hop(EchoModel()) as over:
        stream = OpenStream(over.core.grpc.methods["/inference.GRPCInferenceService/ModelStreamInfer"])
        for number in range(1000):
            stream.send(infer_request([number], id=str(number)))
        stream.half_close()
        for number in range(1000):
            reply = await stream.receive(pb.ModelStreamInferResponse)
            assert reply.infer_response.id == str(number)
        assert await stream.status() == (Status.OK, "")


async def test_a_stream_whose_client_leaves_cancels_its_requests() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        stream = OpenStream(over.core.grpc.methods["/inference.GRPCInferenceService/ModelStreamInfer"])
        for number in range(5):
            stream.send(infer_request([number]))
        await until(lambda: len(model.held) == 5)
        await stream.cancel()
        await until(lambda: len(model.cancelled) == 5)


async def test_reflection_crosses_the_hop() -> None:
    async with hop() as over:
        stream = OpenStream(over.core.grpc.methods["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"])
        stream.send(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await stream.receive(reflection_pb2.ServerReflectionResponse)
        assert "inference.GRPCInferenceService" in {each.name for each in reply.list_services_response.service}
        stream.half_close()
        assert await stream.status() == (Status.OK, "")


async def test_health_is_watched_across_the_hop() -> None:
    model = EchoModel()
    response = health_pb2.HealthCheckResponse
    async with hop(model) as over:
        stream = OpenStream(over.core.grpc.methods[f"{HEALTH}/Watch"])
        stream.send(health_pb2.HealthCheckRequest(service="echo"))
        assert (await stream.receive(response)).status == response.SERVING
        model.ready = False
        assert (await stream.receive(response)).status == response.NOT_SERVING
        assert over.local.grpc is not None
        over.local.grpc.drain()
        assert await stream.status() == (Status.OK, "")


async def test_a_watcher_that_leaves_is_forgotten() -> None:
    async with hop(EchoModel()) as over:
        stream = OpenStream(over.core.grpc.methods[f"{HEALTH}/Watch"])
        stream.send(health_pb2.HealthCheckRequest())
        await stream.receive(health_pb2.HealthCheckResponse)
        await stream.cancel()
        await until(lambda: over.is_idle)


async def test_a_watch_without_a_request_ends_with_its_status() -> None:
    async with hop() as over:
        stream = OpenStream(over.core.grpc.methods[f"{HEALTH}/Watch"])
        stream.half_close()
        status, text = await stream.status()
        assert (status, text) == (Status.INVALID_ARGUMENT, "Watch needs a HealthCheckRequest, got none")


class Methods:
    """A gRPC frontend with one handler under the name of a method that is forwarded."""

    def __init__(self, method: Method) -> None:
        self.methods = {"/inference.GRPCInferenceService/ServerLive": method, f"{HEALTH}/Watch": method}

    def drain(self) -> None:
        pass


async def test_metadata_deadline_and_cancel_of_a_call_cross() -> None:
    calls: list[UnaryCall] = []
    async with hop(grpc=Methods(Method(unary=calls.append))) as over:
        metadata = {"key": "v\u00e4lue", "key-bin": b"\x00\xff"}
        call = Call(b"m" * MIB, metadata, deadline_ns=12345678901234)
        handle = over.core.grpc.methods["/inference.GRPCInferenceService/ServerLive"].unary
        assert handle is not None
        handle(call)
        await until(lambda: bool(calls))
        (asked,) = calls
        assert (asked.metadata, asked.deadline_ns) == (metadata, 12345678901234)
        assert bytes(asked.message) == b"m" * MIB
        cancelled = asyncio.Event()
        asked.on_cancel = cancelled.set
        assert call.on_cancel is not None
        call.on_cancel()
        await asyncio.wait_for(cancelled.wait(), 60)
        asked.fail(Status.CANCELLED, "as you wish")
        with pytest.raises(RefusedError, match="as you wish"):
            await call.answer()


async def test_an_error_that_has_no_utf8_costs_no_other_call_anything() -> None:
    calls: list[UnaryCall] = []
    async with hop(grpc=Methods(Method(unary=calls.append))) as over:
        handle = over.core.grpc.methods["/inference.GRPCInferenceService/ServerLive"].unary
        assert handle is not None
        made = [Call(b""), Call(b"")]
        for each in made:
            handle(each)
        await until(lambda: len(calls) == 2)
        calls[0].fail(Status.INTERNAL, "no file '\udcff'")
        calls[1].reply((b"fine",))
        with pytest.raises(RefusedError, match=r"no file '\?'"):
            await made[0].answer()
        assert await made[1].answer() == b"fine"


async def test_streams_wait_for_whoever_is_slow() -> None:
    num_read = 0
    may_read = asyncio.Event()

    async def serve(call: StreamCall) -> None:
        nonlocal num_read
        await may_read.wait()
        async for message in call.messages:
            num_read += 1
            await call.send((b"<", message, b">"))
        raise RpcError(Status.NOT_FOUND, "told so")

    async with hop(grpc=Methods(Method(stream=serve))) as over:
        stream = OpenStream(over.core.grpc.methods[f"{HEALTH}/Watch"])
        for number in range(200):
            stream.send(b"%d" % number)
        stream.half_close()
        await until(lambda: stream.num_read > WINDOW_PIECES)
        await asyncio.sleep(0.02)
        # One more is in the hands of the one that waits for room.
        assert stream.num_read == WINDOW_PIECES + 1
        stream.has_room.clear()
        may_read.set()
        await until(lambda: num_read > WINDOW_PIECES)
        await asyncio.sleep(0.02)
        assert num_read <= 2 * WINDOW_PIECES + 1
        stream.has_room.set()
        assert await stream.status() == (Status.NOT_FOUND, "told so")
        assert stream.num_unread == 200


async def test_a_handler_that_fails_ends_its_stream_with_a_status(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(call: StreamCall) -> None:
        raise RuntimeError("a bug")

    async with hop(grpc=Methods(Method(stream=serve))) as over:
        stream = OpenStream(over.core.grpc.methods[f"{HEALTH}/Watch"])
        assert (await stream.status())[0] is Status.INTERNAL
    assert "a bug" in caplog.text


async def test_the_end_of_a_front_ends_all_that_it_forwarded() -> None:
    replier = Replier()
    ended = asyncio.Event()

    async def serve(call: StreamCall) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with hop(http=replier, grpc=Methods(Method(stream=serve))) as over:
        over.core.http.handle(Exchange("GET", "/v2/x"))
        stream = OpenStream(over.core.grpc.methods[f"{HEALTH}/Watch"])
        left = asyncio.Event()
        asked = await replier.next()
        asked.on_disconnect = left.set
        over.core.link.close()
        await until(lambda: bool(over.lost))
        over.session.close()
        await asyncio.wait_for(ended.wait(), 60)
        assert left.is_set()
        await stream.cancel()
        over.core._calls._calls.clear()


async def test_refusals_while_draining_cross() -> None:
    model = EchoModel(datatype=Datatype.FP32)
    model.refuses = UnavailableError("the server is shutting down")
    async with hop(model) as over:
        with pytest.raises(RefusedError, match="shutting down") as caught:
            await call_unary(over.core.grpc.methods, "ModelInfer", infer_request([1]), pb.ModelInferResponse)
        assert caught.value.status is Status.UNAVAILABLE

from __future__ import annotations

from collections.abc import Mapping

import pytest
from grpc_health.v1 import health_pb2
from support.echo import EchoModel
from support.grpc_calls import OpenStream, RefusedError, call_unary, turns

from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.planes.data import DataPlane
from modelserver.protocol.call import Method
from modelserver.protocol.grpc_status import Status

Methods = Mapping[str, Method]
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
Reply = health_pb2.HealthCheckResponse


async def check(methods: Methods, service: str) -> int:
    return (await call_unary(methods, CHECK, health_pb2.HealthCheckRequest(service=service), Reply)).status


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "echo"])
async def test_check_falls_with_readiness(methods: Methods, dataplane: DataPlane, service: str) -> None:
    assert await check(methods, service) == Reply.SERVING
    dataplane.begin_shutdown()
    assert await check(methods, service) == Reply.NOT_SERVING


async def test_check_of_a_model_that_is_not_ready(methods: Methods, model: EchoModel) -> None:
    model.ready = False
    assert await check(methods, "echo") == Reply.NOT_SERVING


async def test_check_of_an_unknown_service(methods: Methods) -> None:
    with pytest.raises(RefusedError) as caught:
        await check(methods, "unknown")
    assert caught.value.status is Status.NOT_FOUND


async def test_watch_reports_changes_only(methods: Methods, model: EchoModel) -> None:
    stream = OpenStream(methods[WATCH])
    stream.send(health_pb2.HealthCheckRequest(service="echo"))
    stream.half_close()
    assert (await stream.receive(Reply)).status == Reply.SERVING
    model.ready = False
    assert (await stream.receive(Reply)).status == Reply.NOT_SERVING
    model.ready = True
    assert (await stream.receive(Reply)).status == Reply.SERVING
    assert stream.num_unread == 0
    await stream.cancel()


async def test_watch_of_an_unknown_service_waits_for_it(methods: Methods) -> None:
    stream = OpenStream(methods[WATCH])
    stream.send(health_pb2.HealthCheckRequest(service="unknown"))
    assert (await stream.receive(Reply)).status == Reply.SERVICE_UNKNOWN
    await turns()
    assert not stream.task.done()
    await stream.cancel()


async def test_watch_ends_with_not_serving_when_the_server_drains(frontend: GrpcFrontend, dataplane: DataPlane) -> None:
    stream = OpenStream(frontend.methods[WATCH])
    stream.send(health_pb2.HealthCheckRequest())
    assert (await stream.receive(Reply)).status == Reply.SERVING
    dataplane.begin_shutdown()
    frontend.drain()
    assert (await stream.receive(Reply)).status == Reply.NOT_SERVING
    assert await stream.status() == (Status.OK, "")


@pytest.mark.parametrize("sends_garbage", [True, False])
async def test_watch_without_a_request(methods: Methods, sends_garbage: bool) -> None:
    stream = OpenStream(methods[WATCH])
    if sends_garbage:
        stream.send(b"\xff")
    stream.half_close()
    assert (await stream.status())[0] is Status.INVALID_ARGUMENT

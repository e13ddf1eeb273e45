"""How a server leaves those who send it requests: it says so first, and answers what it cannot finish."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.asking import ask
from support.async_clients import AsyncClient, AsyncGrpcClient, AsyncHttpClient
from support.clients import ClientError, GrpcClient, HttpClient
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.layouts import layout
from support.model_files import write_identity
from support.processes import serving_process
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

# In which a test says a few words, on whatever machine; then it lets the rest of it pass.
DELAY_S = 60


@pytest.fixture(params=["native", "native-processes", "grpcio"])
def ports(request: pytest.FixtureRequest) -> str:
    """Each layout that stops in its own way."""
    name: str = request.param
    return name


@pytest.fixture(params=[AsyncHttpClient, AsyncGrpcClient])
def async_protocol(request: pytest.FixtureRequest) -> type[AsyncClient]:
    """The asyncio client class of each protocol in turn."""
    kind: type[AsyncClient] = request.param
    return kind


def _begin_stop(server: RunningServer) -> Future[None]:
    return asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)


async def _ended(stopping: Future[None]) -> None:
    await asyncio.wait_for(asyncio.wrap_future(stopping), 60)


async def test_the_delay_serves_on_while_it_says_that_it_is_not_ready(
    async_protocol: type[AsyncClient], tmp_path: Path, ports: str
) -> None:
    """Old connections and new ones."""
    write_gated(tmp_path, "held", max_batch_size=1)
    with (
        layout(ports),
        running_server(tmp_path, backend_directory=(BACKEND_DIRECTORY,), drain_delay_secs=DELAY_S) as running,
    ):
        async with async_protocol(running) as client, GatedModel(running, client, "held") as held:
            with HttpClient(running) as other:
                assert other.is_ready()
                tasks = [await held.block()]
                stopping = _begin_stop(running)
                await until(lambda: not other.is_ready(), "readiness fell")
                assert other.is_live()
                tasks.append(await held.send("late"))
            with GrpcClient(running) as newcomer:
                assert newcomer.is_live()
                assert not newcomer.is_ready()
            held.gate.release()
            for task in tasks:
                await task
            running.pass_time(DELAY_S)
            await _ended(stopping)
            assert held.gate.batches == [("blocker",), ("late",)]


async def test_what_takes_too_long_is_told_so(
    async_protocol: type[AsyncClient], tmp_path: Path, ports: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What executes, and what is queued; the process would end with a status that says so."""
    caplog.set_level(logging.INFO, "modelserver")
    write_gated(tmp_path, "held", max_batch_size=1)
    with (
        layout(ports),
        running_server(tmp_path, backend_directory=(BACKEND_DIRECTORY,), exit_timeout_secs=0) as running,
    ):
        async with async_protocol(running) as client, GatedModel(running, client, "held") as held:
            tasks = [await held.block(), await held.send("queued")]
            stopping = _begin_stop(running)
            for task in tasks:
                with pytest.raises(ClientError, match="gives this request up after --exit-timeout-secs") as told:
                    await task
                assert told.value.code is ErrorCode.UNAVAILABLE
            held.gate.release()
            await _ended(stopping)
    assert running.server.is_abandoned
    assert "Found 1 model versions that have in-flight inferences" in caplog.messages
    assert "Model 'held' (version 1) has 2 in-flight inferences" in caplog.messages


async def test_health_says_so_in_each_protocol_s_own_way(tmp_path: Path, ports: str) -> None:
    with layout(ports), running_server(tmp_path, drain_delay_secs=DELAY_S) as gated:
        with grpc.insecure_channel(gated.grpc_url) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            question = health_pb2.HealthCheckRequest(service="")
            assert health.Check(question, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
            stopping = _begin_stop(gated)
            await until(
                lambda: health.Check(question, timeout=10).status == health_pb2.HealthCheckResponse.NOT_SERVING,
                "the health service said so",
            )
            async with httpx.AsyncClient() as http:
                json_please = {"Accept": "application/json"}
                answer = await http.get(f"http://{gated.http_url}/v2/health/ready", headers=json_please)
                assert (answer.status_code, answer.json()["ready"]) == (503, False)
                assert (await http.get(f"http://{gated.http_url}/v2/health/live")).status_code == 200
                assert (await http.get(f"http://{gated.metrics_url}/metrics")).status_code == 200
                assert answer.headers["connection"] == "close"
        gated.pass_time(DELAY_S)
        await _ended(stopping)


def test_ports_open_when_the_models_are_there_where_that_is_wished(tmp_path: Path) -> None:
    """For proxies that send requests to whatever listens; the metrics are there at once."""
    write_identity(tmp_path)
    with serving_process(tmp_path, "--listen-when-ready") as server:
        server.wait_until_started()
        assert ask(server.http_url, "GET", "/v2/health/ready")[0] == 200
        server.signal()
        assert server.wait() == 0
        events = [server.output.index(text) for text in ("metrics listens", "serves versions", "HTTP and gRPC listens")]
        assert events == sorted(events), server.output

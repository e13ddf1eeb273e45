"""The end of a server: nobody else comes in, what was accepted is answered, and the books balance."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.async_clients import AsyncClient
from support.clients import ClientError, GrpcClient, HttpClient
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.serving import ADDRESS, RunningServer, running_server

QUEUE = """dynamic_batching {
  default_queue_policy { max_queue_size: 3 allow_timeout_override: true }
}"""


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[RunningServer]:
    write_gated(tmp_path, "held", max_batch_size=1, more=QUEUE)
    write_gated(tmp_path, "waiting", more="dynamic_batching { max_queue_delay_microseconds: 60000000 }")
    with running_server(tmp_path, backend_directory=(BACKEND_DIRECTORY,), exit_timeout_secs=20) as running:
        yield running


def _begin_stop(server: RunningServer) -> Future[None]:
    return asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)


async def _ended(stopping: Future[None]) -> None:
    await asyncio.wait_for(asyncio.wrap_future(stopping), 60)


def _is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ADDRESS, port)) != 0


async def test_what_was_accepted_is_answered_and_nobody_else_comes_in(
    async_protocol: type[AsyncClient], gated: RunningServer
) -> None:
    server = gated.server
    async with async_protocol(gated) as client, GatedModel(gated, client, "held") as held:
        tasks = [await held.block(), await held.send("first"), await held.send("second")]
        stopping = _begin_stop(gated)
        await until(lambda: _is_refused(server.http_port) and _is_refused(server.grpc_port), "the ports closed")
        assert not _is_refused(server.metrics_port), "an operator sees what goes on"
        assert not any(task.done() for task in tasks)
        assert not stopping.done()
        held.gate.release()
        for task in tasks:
            await task
        await _ended(stopping)
        assert held.gate.batches == [("blocker",), ("first",), ("second",)]
    assert _is_refused(server.metrics_port)
    assert not server.is_abandoned


async def test_nobody_waits_out_a_queue_delay_at_the_end(
    async_protocol: type[AsyncClient], gated: RunningServer
) -> None:
    async with async_protocol(gated) as client, GatedModel(gated, client, "waiting") as waiting:
        waiting.gate.release()
        task = await waiting.send("alone")
        await _ended(_begin_stop(gated))
        assert (await task).id == "alone"


async def test_every_request_is_in_the_statistics_once(async_protocol: type[AsyncClient], gated: RunningServer) -> None:
    """Answered, refused by a full queue, timed out and cancelled: success and failure add up to what was sent."""
    async with async_protocol(gated) as client, GatedModel(gated, client, "held") as held:
        await held.block()
        left = await held.send("left")
        await held.send("patient")
        with pytest.raises(ClientError, match="timeout expired"):
            await held.start("impatient", timeout=20_000)
        await held.send("patient too")
        with pytest.raises(ClientError, match="Exceeds maximum queue size"):
            await held.start("one too many")
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await until(lambda: held.queue_depth == 2, "the request left the queue")
        held.gate.release()
        await until(lambda: held.inflight == 0, "all were answered")
        for sync in (HttpClient, GrpcClient):
            with sync(gated) as reader:
                (row,) = reader.statistics("held")
            assert (row["inference_stats"]["success"]["count"], row["inference_stats"]["fail"]["count"]) == (3, 3)
            assert (row["inference_count"], row["execution_count"]) == (3, 3)
            assert row["batch_stats"][0]["compute_infer"]["count"] == 3
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://{gated.metrics_url}/metrics")).text
    samples = {
        (sample.name.removesuffix("_total"), sample.labels.get("reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model") == "held"
    }
    assert samples["nv_inference_request_success", ""] == 3
    assert samples["nv_inference_request_failure", "REJECTED"] == 2
    assert samples["nv_inference_request_failure", "CANCELED"] == 1
    assert samples["nv_inference_pending_request_count", ""] == 0

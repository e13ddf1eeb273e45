"""Clients that leave: their request goes, at whatever point it is, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from support.async_clients import AsyncClient, AsyncGrpcClient
from support.clients import Answer, ClientError
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.serving import ADDRESS, RunningServer, running_server


@pytest.fixture(scope="module")
def gated(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("gated")
    write_gated(root, "plain", max_batch_size=4, more="dynamic_batching { }")
    write_gated(root, "ordered", max_batch_size=4, more="dynamic_batching { preserve_ordering: true }")
    write_gated(root, "single")
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], gated: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(gated) as connected:
        yield connected


Open = Callable[[str], GatedModel]


@pytest.fixture
def model(gated: RunningServer, client: AsyncClient) -> Open:
    return lambda name: GatedModel(gated, client, name)


async def _leave(task: asyncio.Task[Answer]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _failures(gated: RunningServer, name: str) -> dict[str, int]:
    model = gated.server.repository.get(name, None)
    return gated.call(lambda: {reason.name: count for reason, count in model.statistics.snapshot().failures.items()})


@pytest.mark.parametrize("name", ["plain", "ordered"])
@pytest.mark.parametrize("position", range(4))
async def test_one_that_waits_leaves_and_the_others_share_a_batch(
    model: Open, gated: RunningServer, name: str, position: int
) -> None:
    async with model(name) as held:
        before = _failures(gated, name).get("CANCELED", 0)
        await held.block()
        tasks = [await held.send(f"{number}") for number in range(4)]
        await _leave(tasks[position])
        await until(lambda: held.queue_depth == 3, "the request left the queue")
        held.gate.release()
        others = [f"{number}" for number in range(4) if number != position]
        await asyncio.gather(*(tasks[int(number)] for number in others))
        assert held.gate.batches == [("blocker",), tuple(others)]
        assert _failures(gated, name)["CANCELED"] == before + 1


@pytest.mark.parametrize("position", range(4))
async def test_one_that_executes_leaves_and_the_others_get_their_answers(model: Open, position: int) -> None:
    async with model("plain") as plain:
        await plain.block()
        tasks = [await plain.send(f"{number}") for number in range(4)]
        plain.gate.let("blocker")
        await until(lambda: len(plain.gate.batches) == 2, "the batch executed")
        await _leave(tasks[position])
        plain.gate.release()
        await asyncio.gather(*(task for number, task in enumerate(tasks) if number != position))
        await until(lambda: plain.inflight == 0, "the batch was delivered")


async def test_all_leave_and_the_next_request_is_served(model: Open) -> None:
    async with model("plain") as plain:
        tasks = [await plain.block(), *[await plain.send(f"{number}") for number in range(6)]]
        for task in tasks:
            await _leave(task)
        await until(lambda: plain.queue_depth == 0, "the queue emptied")
        plain.gate.release()
        assert (await plain.start("next")).id == "next"
        assert plain.gate.batches == [("blocker",), ("next",)]


async def test_a_model_without_batching_drops_who_left(model: Open) -> None:
    async with model("single") as single:
        await single.block()
        first, second = await single.send("first"), await single.send("second")
        await _leave(first)
        await until(lambda: single.queue_depth == 1, "the request left the queue")
        single.gate.release()
        await second
        assert single.gate.batches == [("blocker",), ("second",)]


async def test_a_request_whose_deadline_passes_is_never_executed(gated: RunningServer) -> None:
    async with AsyncGrpcClient(gated) as client, GatedModel(gated, client, "plain") as plain:
        await plain.block()
        patient = await plain.send("patient")
        with pytest.raises(ClientError) as late:
            await plain.start("hasty", client_timeout=0.1)
        assert "DEADLINE_EXCEEDED" in late.value.status
        await until(lambda: plain.queue_depth == 1, "the request left the queue")
        plain.gate.release()
        await patient
        assert plain.gate.batches == [("blocker",), ("patient",)]


async def test_a_stream_that_is_cancelled_takes_its_requests_along(gated: RunningServer) -> None:
    async with AsyncGrpcClient(gated) as client, GatedModel(gated, client, "plain") as plain:
        await plain.block()
        other = await plain.send("other")

        async def requests() -> AsyncIterator[dict[str, object]]:
            for number in range(3):
                tensor = client.library.InferInput("INPUT0", [1, 1], "INT32")
                tensor.set_data_from_numpy(np.zeros((1, 1), np.int32))
                yield {"model_name": "plain", "inputs": [tensor], "request_id": f"s{number}"}
            await asyncio.Event().wait()

        responses = client.raw.stream_infer(requests())
        reader = asyncio.create_task(anext(responses))
        await until(lambda: plain.queue_depth == 4, "the stream's requests waited")
        responses.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await reader
        await until(lambda: plain.queue_depth == 1, "the stream's requests left")
        plain.gate.release()
        await other
        assert plain.gate.batches == [("blocker",), ("other",)]


async def test_a_body_that_ends_early_reaches_no_model(model: Open, gated: RunningServer) -> None:
    host, port = ADDRESS, gated.server.http_port
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with model("plain") as plain:
        await plain.block("whole")
        plain.gate.release()
        await until(lambda: plain.inflight == 0, "it was answered")
        assert plain.gate.batches == [("whole",)]

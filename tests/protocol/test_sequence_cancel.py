"""Clients that leave in the middle of a sequence take the whole of it with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.clients import Answer, ClientError
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.serving import RunningServer, running_server

STRATEGIES = ["direct", "oldest"]


@pytest.fixture(scope="module")
def gated(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("sequence_cancel")
    for strategy in STRATEGIES:
        batching = f"sequence_batching {{ {strategy} {{ }} max_sequence_idle_microseconds: 3600000000 }}"
        write_gated(root, strategy, max_batch_size=1, more=batching)
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], gated: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(gated) as connected:
        yield connected


async def _leave(task: asyncio.Task[Answer]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_one_request_leaves_and_its_sequence_with_it(
    gated: RunningServer, client: AsyncClient, strategy: str
) -> None:
    async with GatedModel(gated, client, strategy) as model:
        await model.block(sequence_id=1, sequence_start=True)
        leaving = await model.send("leaving", sequence_id=1)
        behind = await model.send("behind", sequence_id=1, sequence_end=True)
        other = await model.send("other", sequence_id=2, sequence_start=True, sequence_end=True)
        await _leave(leaving)
        with pytest.raises(ClientError, match="was cancelled, or another one of its sequence"):
            await behind
        with pytest.raises(ClientError, match="must specify the START flag"):
            await client.infer(strategy, {"INPUT0": np.zeros((1, 1), np.int32)}, sequence_id=1)
        model.gate.release()
        await other
        assert model.gate.batches == [("blocker",), ("other",)]
        await until(lambda: model.inflight == 0, "nobody is left")


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_who_executes_is_answered_and_the_next_sequence_gets_the_slot(
    gated: RunningServer, client: AsyncClient, strategy: str
) -> None:
    async with GatedModel(gated, client, strategy) as model:
        executing = await model.block(sequence_id=1, sequence_start=True)
        waiting = await model.send("waiting", sequence_id=2, sequence_start=True, sequence_end=True)
        await _leave(executing)
        served = gated.server.repository.get(strategy, None)
        await until(lambda: not gated.call(lambda: served.has_sequence(1)), "the server knows")
        model.gate.release()
        # The slot of the sequence that was left is free at once, although it had no END.
        async with asyncio.timeout(60):
            await waiting

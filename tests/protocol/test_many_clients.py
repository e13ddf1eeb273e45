"""Hundreds of clients of both protocols at once, good and bad: everyone gets what is theirs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import tritonclient.grpc.aio
from support.async_clients import AsyncClient, AsyncGrpcClient, AsyncHttpClient
from support.clients import ClientError
from support.model_files import write_identity
from support.onnx_models import onnx_model, value, write_model
from support.reflecting import write_reflecting
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

NUM_CLIENTS = 100  # of each protocol
NUM_REQUESTS = 12  # of each client, one after the other
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 2000 }"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "direct", data_type="TYPE_INT64")
    write_identity(root, "slow", data_type="TYPE_INT64", execute_delay_ms=5, more=BATCHING)
    write_reflecting(root)
    model = onnx_model([value("INPUT0", ["batch", "width"], 7)], [value("OUTPUT0", ["batch", "width"], 7)])
    write_model(root / "onnx", model)
    (root / "onnx" / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 16 {BATCHING}')
    with running_server(root) as running:
        yield running


class OwnConnection(AsyncGrpcClient):
    """grpcio's channels to one address share their connection unless told otherwise."""

    def __init__(self, server: RunningServer) -> None:
        arguments = [("grpc.use_local_subchannel_pool", 1)]
        self.raw = tritonclient.grpc.aio.InferenceServerClient(server.grpc_url, channel_args=arguments)


async def _good(client: AsyncClient, mark: int) -> str:
    """A request with data that no other has; the kind of it."""
    model = random.Random(mark).choice(["direct", "slow", "onnx", "reflect"])
    if model == "reflect":
        text = f"text of {mark}".encode()
        answer = await client.infer(model, {"TEXT": np.array([text], object)}, request_id=f"{mark}")
        assert answer["TEXT"].tolist() == [text]
        assert f'"id": "{mark}"'.encode() in answer["TOLD"].item()
    else:
        data = np.full((1 + mark % 3, 1 + mark % 5), mark, np.int64)
        answer = await client.infer(model, {"INPUT0": data}, request_id=f"{mark}")
        np.testing.assert_array_equal(answer["OUTPUT0"], data)
    assert answer.id == f"{mark}"
    return model


async def _bad(client: AsyncClient, mark: int) -> str:
    """A request that cannot be answered, and an error that is its own; the kind of it."""
    model, data, code, told = random.Random(mark).choice(
        [
            (f"nobody{mark}", np.zeros((1, 1), np.int64), ErrorCode.NOT_FOUND, f"nobody{mark}"),
            ("slow", np.zeros((1, 1), np.int32), ErrorCode.INVALID_ARGUMENT, "INT64"),
            ("onnx", np.zeros((17 + mark, 1), np.int64), ErrorCode.INVALID_ARGUMENT, "must be <= 16"),
            ("direct", np.zeros((mark,), np.int64), ErrorCode.INVALID_ARGUMENT, f"[{mark}]"),
        ]
    )
    with pytest.raises(ClientError) as refused:
        await client.infer(model, {"INPUT0": data})
    assert refused.value.code is code
    assert told in refused.value.message
    return f"refused by {model.rstrip('0123456789')}"


async def _work(protocol: type[AsyncClient], server: RunningServer, number: int, seen: Counter[str]) -> None:
    async with protocol(server) as client:
        for turn in range(NUM_REQUESTS):
            mark = 1 + number * NUM_REQUESTS + turn
            kind = await (_bad if mark % 3 == 0 else _good)(client, mark)
            seen[kind] += 1


async def test_everyone_gets_what_is_theirs(served: RunningServer) -> None:
    seen: Counter[str] = Counter()
    protocols = [protocol for protocol in (AsyncHttpClient, OwnConnection) for _ in range(NUM_CLIENTS)]
    before = _totals(served)
    await asyncio.gather(*(_work(protocol, served, number, seen) for number, protocol in enumerate(protocols)))
    assert sum(seen.values()) == 2 * NUM_CLIENTS * NUM_REQUESTS
    assert len(seen) == 8, "every kind of request was made"
    answered = sum(count for kind, count in seen.items() if not kind.startswith("refused"))
    assert _totals(served) - before == Counter(success=answered)


def _totals(server: RunningServer) -> Counter[str]:
    """What the models have counted; a request that never was one of a model's does not count."""
    snapshots = server.call(lambda: [snapshot for _, snapshot in server.server.dataplane.statistics()])
    return Counter(
        success=sum(snapshot.success.count for snapshot in snapshots), fail=sum(each.fail.count for each in snapshots)
    )


async def test_connections_that_come_and_go(served: RunningServer) -> None:
    """Half of the clients leave in the middle of their request; the others do not notice."""

    async def leave(protocol: type[AsyncClient], mark: int) -> None:
        async with protocol(served) as client:
            task = asyncio.create_task(client.infer("slow", {"INPUT0": np.full((1, 1), mark, np.int64)}))
            await asyncio.sleep(random.Random(mark).random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stay(protocol: type[AsyncClient], mark: int) -> None:
        async with protocol(served) as client:
            for turn in range(3):
                data = np.full((1, 1), mark * 10 + turn, np.int64)
                np.testing.assert_array_equal((await client.infer("slow", {"INPUT0": data}))["OUTPUT0"], data)

    await asyncio.gather(
        *(
            call(protocol, mark)
            for mark in range(50)
            for protocol in (AsyncHttpClient, OwnConnection)
            for call in (leave, stay)
        )
    )


def test_streams_side_by_side(served: RunningServer) -> None:
    """Many streams on one connection, each with its own answers in its own order."""

    async def stream(client: AsyncGrpcClient, number: int) -> None:
        async def requests() -> AsyncIterator[dict[str, object]]:
            for turn in range(10):
                tensor = client.library.InferInput("INPUT0", [1, 1], "INT64")
                tensor.set_data_from_numpy(np.full((1, 1), number * 100 + turn, np.int64))
                yield {"model_name": "slow" if turn % 2 else "direct", "inputs": [tensor], "request_id": f"{turn}"}

        turn = 0
        async for result, error in client.raw.stream_infer(requests()):
            assert error is None
            assert result.get_response().id == f"{turn}"
            assert result.as_numpy("OUTPUT0").item() == number * 100 + turn
            turn += 1
        assert turn == 10

    async def run() -> None:
        async with AsyncGrpcClient(served) as client:
            await asyncio.gather(*(stream(client, number) for number in range(40)))

    asyncio.run(run())


async def test_a_stream_may_be_longer_than_what_is_in_flight_at_once(served: RunningServer) -> None:
    """256 requests of a stream are in flight; the client waits to send more, and nobody waits for ever."""
    num_requests = 1000

    async with AsyncGrpcClient(served) as client:

        async def requests() -> AsyncIterator[dict[str, object]]:
            for number in range(num_requests):
                tensor = client.library.InferInput("INPUT0", [1, 1], "INT64")
                tensor.set_data_from_numpy(np.full((1, 1), number, np.int64))
                yield {"model_name": "slow", "inputs": [tensor], "request_id": f"{number}"}

        values = [result.as_numpy("OUTPUT0").item() async for result, _ in client.raw.stream_infer(requests())]
    assert values == list(range(num_requests))

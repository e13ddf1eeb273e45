"""Against a real redis-server, where there is one; and against none, which any machine has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from support.certificates import Authority
from support.layouts import free_port
from support.redis_server import redis_server

from modelserver.cache.redis_store import RedisStore
from modelserver.cache.settings import RedisSettings
from modelserver.cache.store import CachedAnswer, RequestKey
from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor

HOST = "127.0.0.1"


def key(name: str) -> RequestKey:
    return RequestKey(b"g", name.encode(), [b"input"])


RESPONSE = InferResponse(
    [
        Tensor("A", Datatype.FP32, np.arange(6, dtype=np.float32).reshape(2, 3)),
        Tensor("B", Datatype.BYTES, np.array([b"x", b""], object)),
        Tensor("C", Datatype.BF16, np.array([1, 2], np.uint16)),
        Tensor("D", Datatype.BOOL, np.array([[True]])),
    ],
    parameters={"text": "a", "number": 2, "share": 0.5, "flag": True},
)


@asynccontextmanager
async def opened(port: int, **settings: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(RedisSettings(HOST, port, **settings))
    try:
        yield store
    finally:
        await store.close()


async def find(store: RedisStore, name: str) -> CachedAnswer | None:
    found: asyncio.Future[CachedAnswer | None] = asyncio.get_running_loop().create_future()
    store.look_up(key(name), found.set_result)
    return await found


async def put(store: RedisStore, name: str) -> None:
    store.insert(key(name), store.pack(key(name), RESPONSE))
    await asyncio.gather(*store._exchanges)


@pytest.mark.tool("redis-server")
async def test_what_is_kept_is_found_by_other_servers_too(tmp_path: Path) -> None:
    with redis_server(tmp_path, free_port()) as server:
        async with opened(server.port) as store, opened(server.port) as other:
            assert await find(store, "a") is None
            await put(store, "a")
            assert await find(store, "b") is None
            for each in (store, other):
                answer = await find(each, "a")
                assert answer is not None
                for tensor, kept in zip(RESPONSE.outputs, answer.outputs, strict=True):
                    assert (tensor.name, tensor.datatype) == (kept.name, kept.datatype)
                    np.testing.assert_array_equal(tensor.data, kept.data)
                assert answer.parameters == RESPONSE.parameters
            assert (store.counts.lookups, store.counts.hits, store.counts.failures) == (3, 1, 0)


@pytest.mark.tool("redis-server")
async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("client")
    trusts = {"is_tls": True, "ca_file": str(authority.certificate)}
    shows = {"certificate": str(pair.certificate), "key": str(pair.key)}
    with redis_server(tmp_path, free_port(), authority) as server:
        async with opened(server.port, **trusts, **shows) as store:
            await put(store, "a")
            answer = await find(store, "a")
            assert answer is not None
            assert [tensor.name for tensor in answer.outputs] == ["A", "B", "C", "D"]
            assert store.counts.failures == 0
        stranger = Authority(tmp_path, "stranger")
        for refused in (trusts, {**trusts, **shows, "ca_file": str(stranger.certificate)}, {}):
            async with opened(server.port, **refused) as store:
                assert await find(store, "a") is None
                assert store.counts.failures == 1


@pytest.mark.tool("redis-server")
async def test_answers_end_with_their_time(tmp_path: Path) -> None:
    with redis_server(tmp_path, free_port()) as server:
        async with opened(server.port, ttl_s=3600.0) as store:
            await put(store, "a")
        with redis.Redis(port=server.port) as client:
            [name] = client.keys()  # type: ignore[misc,union-attr]  # no coroutine: this client is synchronous
            assert 3_590_000 < client.pttl(name) <= 3_600_000  # type: ignore[operator]


@pytest.mark.tool("redis-server")
async def test_what_somebody_else_wrote_is_not_believed(tmp_path: Path) -> None:
    with redis_server(tmp_path, free_port()) as server:
        async with opened(server.port) as store:
            await put(store, "a")
            with redis.Redis(port=server.port) as client:
                [name] = client.keys()  # type: ignore[misc,union-attr]
                of_another = store.pack(key("b"), RESPONSE)
                for raw in (of_another, b"", b"no record", of_another[:-9]):
                    client.set(name, raw)
                    assert await find(store, "a") is None
            assert store.counts.failures == 0


@pytest.mark.tool("redis-server")
async def test_a_server_that_goes_is_left_alone_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("modelserver.cache.redis_store._FIRST_ABSENCE_S", 3600.0)
    with redis_server(tmp_path, free_port()) as server:
        async with opened(server.port) as store:
            await put(store, "a")
            server.stop()
            assert await find(store, "a") is None
            assert store.counts.failures == 1
            assert await find(store, "a") is None  # not asked at all
            assert store.counts.failures == 1
            server.start()
            store._absent_until_s = 0.0  # that time has passed
            assert await find(store, "b") is None
            assert store._absence_s == 0
            await put(store, "a")
            assert await find(store, "a") is not None
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert f"{HOST}:{server.port}, does not answer" in warnings[0]


async def test_a_server_that_is_not_there_finds_nothing_and_keeps_nothing() -> None:
    async with opened(free_port()) as store:
        assert await find(store, "a") is None
        await put(store, "a")
        assert store.counts.failures == 1


async def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    ended = asyncio.Event()

    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    silent = await asyncio.start_server(read_all, HOST, 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        async with opened(port, socket_timeout_s=0.05, connect_timeout_s=0.05, wait_timeout_s=0.05) as store:
            async with asyncio.timeout(60):
                assert await find(store, "a") is None
            assert store.counts.failures == 1
        await ended.wait()

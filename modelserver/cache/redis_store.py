"""Answers in a Redis server, which several servers may share and which outlives them.

Every exchange is asynchronous and bounded in time. A Redis server that does not answer is not used for a
while: lookups then find nothing, nothing is stored, and requests are executed as without a cache.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from modelserver.cache.settings import RedisSettings
from modelserver.cache.store import CachedAnswer, Found, RequestKey, StoreCounts
from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.tensor import tensor_from_bytes, tensor_to_bytes
from modelserver.errors import ServerError

logger = logging.getLogger(__name__)

_PREFIX = "modelserver:answer:"
# How long a failed server is not used: at first, and at most after repeated failures.
_FIRST_ABSENCE_S = 1.0
_LONGEST_ABSENCE_S = 30.0
# Exchanges in flight at most; requests beyond that are not looked up and not stored.
_MAX_EXCHANGES = 1024
# Triton's variables for secrets that should not appear on a command line.
_USER_VARIABLE = "TRITONCACHE_REDIS_USERNAME"
_PASSWORD_VARIABLE = "TRITONCACHE_REDIS_PASSWORD"  # noqa: S105 - the name of a variable


class _TensorRecord(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class _AnswerRecord(msgspec.Struct, array_like=True):
    """An entry in Redis: the answer, and the proof of its request."""

    head: bytes
    check: bytes
    outputs: list[_TensorRecord]
    parameters: dict[str, ParameterValue] | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_AnswerRecord)


class RedisStore:
    """Answers under the digests of their requests. Redis limits its memory (`maxmemory`) and evicts by its policy."""

    is_shared = True

    def __init__(self, settings: RedisSettings) -> None:
        self.counts = StoreCounts()
        self._settings = settings
        self._client: Redis | None = None
        self._exchanges: set[asyncio.Task[None]] = set()
        self._absence_s = 0.0
        self._absent_until_s = 0.0
        self._expiry_ms = None if settings.ttl_s is None else max(1, int(settings.ttl_s * 1000))
        # Independent of the library's own timeouts.
        self._limit_s = settings.connect_timeout_s + settings.socket_timeout_s + settings.wait_timeout_s

    def look_up(self, key: RequestKey, found: Found) -> None:
        self.counts.lookups += 1
        if not self._begin(self._look_up(key, found)):
            found(None)

    def pack(self, key: RequestKey, response: InferResponse) -> bytes:
        outputs = [
            _TensorRecord(tensor.name, tensor.datatype.value, tensor.shape, bytes(tensor_to_bytes(tensor)))
            for tensor in response.outputs
        ]
        parameters = None if response.parameters is None else dict(response.parameters)
        return _encoder.encode(_AnswerRecord(key.head, key.check, outputs, parameters))

    def insert(self, key: RequestKey, packed: bytes) -> None:
        self._begin(self._insert(key, packed))

    def forget(self, generation: bytes) -> None:
        """Other servers may still use the entries: Redis evicts them for space, or when they expire."""

    async def close(self) -> None:
        if self._exchanges:
            await asyncio.wait(self._exchanges)
        if self._client is not None:
            await self._client.aclose()

    def _begin(self, exchange: Coroutine[Any, Any, None]) -> bool:
        """Start an exchange with the server if it is available; returns whether it was started."""
        if len(self._exchanges) >= _MAX_EXCHANGES or time.monotonic() < self._absent_until_s:
            exchange.close()
            return False
        if self._client is None:
            self._client = _connect(self._settings)
        task = asyncio.get_running_loop().create_task(exchange)
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)
        return True

    async def _look_up(self, key: RequestKey, found: Found) -> None:
        began_ns = time.monotonic_ns()
        answer = None
        try:
            raw = await self._ask("GET", _PREFIX + key.digest.hex())
            if raw is not None:
                answer = _unpack(key, raw)
        finally:
            self.counts.hits += answer is not None
            self.counts.lookup_ns += time.monotonic_ns() - began_ns
            found(answer)

    async def _insert(self, key: RequestKey, packed: bytes) -> None:
        began_ns = time.monotonic_ns()
        expiry = () if self._expiry_ms is None else ("PX", self._expiry_ms)
        await self._ask("SET", _PREFIX + key.digest.hex(), packed, *expiry)
        self.counts.insertion_ns += time.monotonic_ns() - began_ns

    async def _ask(self, *command: str | bytes | int) -> bytes | None:
        """The answer of Redis; None also if it does not answer."""
        assert self._client is not None, "an exchange has begun"
        try:
            async with asyncio.timeout(self._limit_s):
                answer: bytes | None = await self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:  # a TimeoutError is an OSError
            self._note_failure(error)
            return None
        if self._absence_s:
            logger.info("the Redis server of the response cache answers again")
            self._absence_s = 0.0
        return answer

    def _note_failure(self, error: Exception) -> None:
        self.counts.failures += 1
        if time.monotonic() < self._absent_until_s:
            return  # one that began before the others failed
        if not self._absence_s:
            logger.warning(
                "the Redis server of the response cache, %s:%d, does not answer (%s): models are asked instead",
                self._settings.host,
                self._settings.port,
                error or type(error).__name__,
            )
        self._absence_s = min(max(_FIRST_ABSENCE_S, 2 * self._absence_s), _LONGEST_ABSENCE_S)
        self._absent_until_s = time.monotonic() + self._absence_s


def _connect(settings: RedisSettings) -> Redis:
    """A client that connects on first use."""
    tls: dict[str, Any] = {}
    if settings.is_tls:
        tls = {
            "connection_class": SSLConnection,
            "ssl_certfile": settings.certificate or None,
            "ssl_keyfile": settings.key or None,
            "ssl_ca_certs": settings.ca_file or None,
            "ssl_ca_path": settings.ca_directory or None,
        }
    pool = BlockingConnectionPool(
        max_connections=settings.pool_size,
        timeout=settings.wait_timeout_s,
        host=settings.host,
        port=settings.port,
        username=settings.user or os.environ.get(_USER_VARIABLE) or None,
        password=settings.password or os.environ.get(_PASSWORD_VARIABLE) or None,
        db=settings.database,
        socket_connect_timeout=settings.connect_timeout_s,
        socket_timeout=settings.socket_timeout_s,
        retry=Retry(NoBackoff(), 0),
        **({"connection_class": Connection} | tls),
    )
    return Redis.from_pool(pool)


def _unpack(key: RequestKey, raw: bytes) -> CachedAnswer | None:
    """The stored answer; None if it is for another request, or from another version of this server."""
    try:
        record = _decoder.decode(raw)
        if not key.is_equal(record.head, record.check):
            return None
        outputs = [
            tensor_from_bytes(tensor.name, Datatype(tensor.datatype), tensor.shape, tensor.data)
            for tensor in record.outputs
        ]
    except (msgspec.MsgspecError, ServerError, ValueError) as error:
        logger.warning("an answer in Redis cannot be read: %s", error)
        return None
    return CachedAnswer(tuple(outputs), record.parameters)

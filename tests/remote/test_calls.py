"""Attempts of a request at endpoints that do what the test says: retries, deadlines, hedges, sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from modelserver.backend import (
    BackendContext,
    ConfigError,
    Datatype,
    ErrorCode,
    InferRequest,
    InferResponse,
    ModelConfig,
    ServerError,
    Tensor,
    UnavailableError,
)
from modelserver.client.call_error import CallError, grpc_error, http_error, not_connected
from modelserver.endpoints.endpoint import Endpoint, EndpointState, Member, Outcome
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.remote import calls
from modelserver.remote.calls import RemoteCalls
from modelserver.remote.options import RemoteOptions, Secret, read_options
from modelserver.remote.v2 import Described, Sent, Transport

Behaviour = Callable[[Sent], Awaitable[InferResponse]]


class Scripted(Transport):
    """Does what it is told, and remembers what it was sent."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.sent: list[Sent] = []
        self.num_cancelled = 0

    async def infer(self, request: InferRequest, sent: Sent) -> InferResponse:
        self.sent.append(sent)
        try:
            return await self.behaviour(sent)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def stream(self, request: InferRequest, sent: Sent) -> AsyncGenerator[InferResponse, None]:
        yield await self.infer(request, sent)

    async def probe(self, headers: Mapping[str, str]) -> EndpointState:
        return EndpointState.READY

    async def describe(self, headers: Mapping[str, str]) -> Described:
        return Described(None, {})

    def lose(self, reason: str) -> None: ...


def options(**parameters: str) -> RemoteOptions:
    written = {"endpoints": "grpc://a:1", **parameters}
    context = BackendContext("m", 1, ModelConfig(parameters=written), Path(), Path())
    return read_options(context)


class Pool:
    def __init__(self, behaviours: Mapping[str, Behaviour], **parameters: str) -> None:
        self.transports = {name: Scripted(behaviour) for name, behaviour in behaviours.items()}
        self.set = EndpointSet(random=Random(2))
        self.set.update([Member(name) for name in behaviours])
        self.calls = RemoteCalls(options(**parameters), self.set, lambda each: self.transports[each.address])

    def __getitem__(self, name: str) -> Endpoint:
        return next(each for each in self.set.endpoints if each.address == name)

    async def infer(self, **fields: Any) -> str:
        """The name of the endpoint that answered."""
        tensor = Tensor("x", Datatype.BYTES, np.array([fields.pop("text", b"hello")], object))
        request = InferRequest(model_name="m", version=1, inputs={"x": tensor}, **fields)
        response = await self.calls.run(
            request, 1, lambda transport, sent: transport.infer(request, sent), has_begun=lambda: False
        )
        return str((response.parameters or {})["by"])

    @property
    def num_sent(self) -> dict[str, int]:
        return {name: len(each.sent) for name, each in self.transports.items()}


def answering(name: str, *, after_s: float = 0.0) -> Behaviour:
    async def behaviour(_: Sent) -> InferResponse:
        await asyncio.sleep(after_s)
        return InferResponse(parameters={"by": name})

    return behaviour


def failing(error: Callable[[], ServerError]) -> Behaviour:
    async def behaviour(_: Sent) -> InferResponse:
        raise error()

    return behaviour


UNPROCESSED = [
    lambda: not_connected("connection refused"),
    lambda: http_error(503, "HTTP 503: shutting down"),
    lambda: http_error(429, "HTTP 429: slow down"),
    lambda: grpc_error(14, "UNAVAILABLE: not ready"),
    lambda: CallError("refused stream", is_unprocessed=True),
]
PROCESSED = [
    lambda: CallError("reset", outcome=Outcome.LOST),
    lambda: http_error(500, "HTTP 500: failed"),
    lambda: http_error(502, "HTTP 502: bad gateway"),
    lambda: grpc_error(13, "INTERNAL: failed"),
]


@pytest.mark.parametrize("error", UNPROCESSED)
def test_what_no_model_has_seen_is_tried_elsewhere(error: Callable[[], ServerError]) -> None:
    async def run() -> None:
        pool = Pool({"a": failing(error), "b": answering("b")})
        for _ in range(5):
            assert await pool.infer() == "b"
        assert pool["a"].num_retries == pool.num_sent["a"]
        assert pool.num_sent["b"] == 5

    asyncio.run(run())


@pytest.mark.parametrize("error", PROCESSED)
def test_what_may_have_been_executed_is_repeated_only_if_the_model_is_idempotent(
    error: Callable[[], ServerError],
) -> None:
    async def run() -> None:
        pool = Pool({"a": failing(error)})
        with pytest.raises(ServerError, match="endpoint a: "):
            await pool.infer()
        assert pool.num_sent == {"a": 1}
        repeated = Pool({"a": failing(error), "b": answering("b")}, idempotent="true")
        for _ in range(5):
            assert await repeated.infer() == "b"

    asyncio.run(run())


def test_a_request_that_is_wrong_is_not_repeated() -> None:
    async def run() -> None:
        pool = Pool({"a": failing(lambda: http_error(400, "HTTP 400: shape")), "b": answering("b")}, idempotent="true")
        pool.set.begin(pool["b"])
        with pytest.raises(ServerError, match="endpoint a: HTTP 400: shape") as failed:
            await pool.infer()
        assert failed.value.code is ErrorCode.INVALID_ARGUMENT
        assert pool["a"].outcomes[Outcome.CLIENT_ERROR] == 1

    asyncio.run(run())


def test_an_error_names_all_that_were_tried_and_one_endpoint_is_tried_again() -> None:
    async def run() -> None:
        pool = Pool({name: failing(lambda: not_connected("refused")) for name in "ab"}, retries="2")
        with pytest.raises(ServerError, match=r"endpoint [ab]: refused \(before it: [ab]: refused"):
            await pool.infer()
        assert sum(pool.num_sent.values()) == 3
        lone = Pool({"a": failing(lambda: not_connected("refused"))})
        with pytest.raises(ServerError, match="endpoint a: refused"):
            await lone.infer()
        assert lone.num_sent == {"a": 2}

    asyncio.run(run())


def test_retries_end_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BACK_OFF_S", 0.0)

    async def run() -> None:
        pool = Pool({"a": failing(lambda: grpc_error(14, "UNAVAILABLE: no"))})
        while pool["a"].num_retries == pool.num_sent["a"] // 2:
            with pytest.raises(ServerError):
                await pool.infer()
        assert 30 <= pool["a"].num_retries < 60

    asyncio.run(run())


def test_an_endpoint_that_asks_for_a_pause_gets_it() -> None:
    async def run() -> None:
        pool = Pool({"a": failing(lambda: http_error(429, "HTTP 429: wait", 60)), "b": answering("b")})
        for _ in range(20):
            assert await pool.infer() == "b"
        assert pool.num_sent["a"] == 1

    asyncio.run(run())


def test_a_deadline_is_handed_on_and_ends_the_attempt() -> None:
    async def run() -> None:
        pool = Pool({"a": answering("a", after_s=30)}, timeout_ms="60000")
        with pytest.raises(ServerError, match="endpoint a: no answer within") as failed:
            await pool.infer(deadline_ns=time.monotonic_ns() + 50_000_000)
        assert failed.value.code is ErrorCode.TIMED_OUT
        assert 0 < (pool.transports["a"].sent[0].ends_s or 0) - time.monotonic() + 1 < 1.05
        assert pool.transports["a"].num_cancelled == 1
        assert pool.set.outstanding == 0
        assert pool["a"].outcomes[Outcome.ABANDONED] == 1, "the caller was in a hurry"

    asyncio.run(run())


def test_a_slow_request_is_asked_for_at_a_second_endpoint_and_the_loser_is_cancelled() -> None:
    async def run() -> None:
        pool = Pool({"a": answering("a", after_s=30), "b": answering("b")}, idempotent="true", hedge_after="20")
        pool.set.begin(pool["b"])
        assert await pool.infer() == "b"
        await asyncio.sleep(0)
        assert pool.transports["a"].num_cancelled == 1
        pool.set.finish(pool["b"], Outcome.DONE, start_ns=0)
        assert pool.set.outstanding == 0
        assert pool.calls.num_hedges == 1
        # Of one request in twenty at most.
        pool.set.begin(pool["b"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.infer(), 0.2)
        assert pool.num_sent["b"] == 1

    asyncio.run(run())


def test_only_idempotent_models_are_hedged() -> None:
    with pytest.raises(ConfigError, match="hedge_after: only requests of a model that is idempotent"):
        options(hedge_after="p95")


def test_a_sequence_stays_and_is_lost_with_its_endpoint() -> None:
    async def run() -> None:
        pool = Pool({name: answering(name) for name in "abc"})
        first = await pool.infer(sequence_id=7, sequence_start=True)
        pool.set.begin(pool[first])  # a load that others would avoid
        assert {await pool.infer(sequence_id=7) for _ in range(20)} == {first}
        endpoint = pool[first]
        pool.set.update([each.member for each in pool.set.endpoints if each is not endpoint])
        assert await pool.infer(sequence_id=7) == first, "one that leaves keeps its sequences"
        pool.transports[first].behaviour = failing(lambda: CallError("reset", outcome=Outcome.LOST))
        with pytest.raises(ServerError, match=f"endpoint {first}: reset; sequence 7 is lost with it"):
            await pool.infer(sequence_id=7)
        assert await pool.infer(sequence_id=7, sequence_start=True) != first

    asyncio.run(run())


def test_the_next_request_of_a_sequence_whose_endpoint_is_down_is_an_error() -> None:
    async def run() -> None:
        pool = Pool({name: answering(name) for name in "ab"})
        first = await pool.infer(sequence_id="s", sequence_start=True)
        pool.set.report_probe(pool[first], EndpointState.DOWN, "no answer")
        with pytest.raises(UnavailableError, match=rf"sequence s was at the endpoint {first}, which is gone \(no ans"):
            await pool.infer(sequence_id="s")

    asyncio.run(run())


@pytest.mark.parametrize("parameters", [{"affinity": "prefix"}, {"policy": "hash"}])
def test_equal_beginnings_go_to_one_endpoint(parameters: dict[str, str]) -> None:
    async def run() -> None:
        pool = Pool({name: answering(name) for name in "abcd"}, **parameters)
        for text in (b"x" * 3000, b"other", b"third"):
            assert (
                len({await pool.infer(text=text + bytes(number)) for number in range(1 if len(text) < 9 else 9)}) == 1
            )
            assert len({await pool.infer(text=text) for _ in range(9)}) == 1

    asyncio.run(run())


def test_a_session_goes_to_one_endpoint() -> None:
    async def run() -> None:
        pool = Pool({name: answering(name) for name in "abcd"}, affinity="session")
        for session in ("one", "two"):
            assert len({await pool.infer(parameters={"x-session-id": session}) for _ in range(9)}) == 1
        assert len({await pool.infer() for _ in range(50)}) == 4

    asyncio.run(run())


def test_a_key_is_read_again_when_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("first\n")
    secret = Secret(path, "")
    assert secret.read() == "first"
    path.write_text("the second")
    assert secret.read() == "the second"
    path.unlink()
    with pytest.raises(UnavailableError, match="the API key cannot be read"):
        secret.read()
    monkeypatch.setenv("REMOTE_KEY", "of the environment")
    assert Secret(None, "REMOTE_KEY").read() == "of the environment"
    monkeypatch.delenv("REMOTE_KEY")
    with pytest.raises(UnavailableError, match="REMOTE_KEY, which holds the API key, is not set"):
        Secret(None, "REMOTE_KEY").read()


def test_headers_and_the_key_go_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_KEY", "secret")

    async def run() -> None:
        pool = Pool({"a": answering("a")}, api_key_env="REMOTE_KEY", headers='{"X-Team": "vision"}')
        await pool.infer()
        headers = pool.transports["a"].sent[0].headers
        assert headers == {"authorization": "Bearer secret", "x-team": "vision", "x-modelserver-hops": "1"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"endpoints": ""}, "expected one of the parameters endpoints"),
        ({"discover": "dns://a:1"}, "expected one of the parameters endpoints"),
        ({"endpoints": "a:8001"}, "expected an address with one of grpc://"),
        ({"endpoints": "grpc://a,openai+https://b/v1"}, "must speak the same API"),
        ({"policy": "best"}, "policy: expected one of least_outstanding, round_robin, hash"),
        ({"affinity": "user"}, "affinity: expected one of none, sequence, session, prefix"),
        ({"headers": "x"}, "headers: expected a JSON object"),
        ({"headers": '{"a\\r\\nb": "c"}'}, "is not a header that can be sent"),
        ({"hedge_after": "p50", "idempotent": "true"}, "hedge_after: expected milliseconds or p95"),
        ({"retries": "many"}, "retries: expected a whole number"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_told(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**parameters)

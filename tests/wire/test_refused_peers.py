"""A client that is refused again and again gets a bounded share: answers wait, and nothing of it is read meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.http1_dialogue import Dialogue
from support.http2_frames import headers, rst_stream
from support.memory_http2 import MemoryPeer, until
from support.raw_http2 import call_fields, get_fields

from modelserver.auth.access import EVERYBODY, Admitted
from modelserver.protocol.call import Metadata, RpcError
from modelserver.protocol.exchange import HttpHead
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.response import HttpResponse
from modelserver.wire import context
from modelserver.wire.context import RefusedPeers

KEY = "x-api-key"
POST = b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n%b\r\n"


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _refused_per_second(peers: RefusedPeers, time: Time, *, num_connections: int, num_bytes: int = 0) -> float:
    """Refusals of a client that comes back as soon as it is answered, over a long time."""
    due_s = [time.now_s] * num_connections
    num_refused, end_s = 0, time.now_s + 100.0
    while (now_s := min(due_s)) < end_s:
        time.now_s = now_s
        peers.dropped("client", num_bytes)
        due_s[due_s.index(now_s)] = now_s + peers.wait_s("client") + 0.001
        num_refused += 1
    return num_refused / 100.0


@pytest.mark.parametrize(("num_bytes", "most_per_s"), [(0, 52.0), (2 << 20, 19.0), (60 << 20, 3.0)])
def test_a_client_that_comes_back_at_once_is_refused_at_a_bounded_rate(num_bytes: int, most_per_s: float) -> None:
    time = Time()
    assert _refused_per_second(RefusedPeers(time), time, num_connections=6, num_bytes=num_bytes) < most_per_s


def test_a_few_refusals_and_other_clients_do_not_wait() -> None:
    time = Time()
    peers = RefusedPeers(time)
    assert [peers.wait_s("client") for _ in range(50)] == [0.0] * 50
    assert peers.wait_s("client") > 0
    assert peers.wait_s("other") == 0.0
    time.now_s += 10.0
    assert peers.wait_s("client") == 0.0


def test_no_wait_is_longer_than_seconds_and_few_clients_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_MAX_CLIENTS", 3)
    time = Time()
    peers = RefusedPeers(time)
    peers.dropped("client", 1 << 50)
    assert 4.0 < peers.wait_s("client") <= 5.0
    for name in "abc":
        assert peers.wait_s(name) == 0.0
    assert peers.wait_s("client") == 0.0  # forgotten: others came after it


class Patient(RefusedPeers):
    """Every refused client has been refused too often; the wait is short."""

    __slots__ = ()

    def wait_s(self, client: str) -> float:
        assert client == "192.0.2.1"
        return 0.01


def _check(head: HttpHead, peer: str) -> Admitted | HttpResponse:
    return EVERYBODY if head.headers.get(KEY) == "right" else HttpResponse(401, ())


def _check_call(metadata: Metadata, _peer: str) -> Admitted:
    if metadata.get(KEY) != "right":
        raise RpcError(Status.UNAUTHENTICATED, "no key")
    return EVERYBODY


@pytest.fixture
async def dialogue() -> Dialogue:
    dialogue = Dialogue()
    dialogue.frontend.check_head = _check  # type: ignore[method-assign]
    dialogue.context.refused_peers = Patient()
    return dialogue


async def test_over_http_1_nothing_is_read_until_the_answer(dialogue: Dialogue) -> None:
    dialogue.begin(POST % b"" + bytes(10))
    assert dialogue.take() == b""
    assert dialogue.transport.is_paused
    await until(lambda: bool(dialogue.transport.written))
    assert dialogue.take().startswith(b"HTTP/1.1 401 ")
    assert not dialogue.transport.is_paused
    assert dialogue.transport.ending == "write_eof"


@pytest.mark.parametrize("end", ["lose", "shutdown", "dismiss", "abort"])
async def test_over_http_1_a_connection_may_end_while_its_client_waits(dialogue: Dialogue, end: str) -> None:
    dialogue.begin(POST % b"" + bytes(10))
    if end == "lose":
        dialogue.lose()
    else:
        getattr(dialogue.connection, end)()
    await asyncio.sleep(0.02)
    answered = dialogue.take().startswith(b"HTTP/1.1 401 ")
    assert answered == (end == "shutdown")


async def test_an_admitted_request_of_the_same_client_does_not_wait(dialogue: Dialogue) -> None:
    dialogue.begin(POST % b"X-Api-Key: right\r\n" + bytes(10))
    dialogue.send(bytes(990))
    assert dialogue.take().endswith(b"/a")


@pytest.mark.parametrize("kind", ["grpc", "rest"])
async def test_over_http_2_only_the_answer_of_the_refused_stream_waits(kind: str) -> None:
    peer = MemoryPeer()
    path, method = next((path, method) for path, method in peer.grpc.methods.items() if path.endswith("/Echo"))
    peer.grpc.methods = {**peer.grpc.methods, path: replace(method, check_head=_check_call)}
    peer.http.check_head = _check  # type: ignore[method-assign]
    peer.context.refused_peers = Patient()
    fields = call_fields("Echo") if kind == "grpc" else get_fields("/a", method="POST")
    peer.send(headers(1, fields, end=False), headers(3, fields, end=False))
    peer.send(rst_stream(3))
    peer.call(5, "Echo", b"x", (KEY, "right"))
    assert peer.answer(5).messages == [b"x"]
    assert peer.answer(1).fields is None
    answer = await peer.until_answered(1)
    assert answer.status == (200 if kind == "grpc" else 401)
    assert peer.answer(3).fields is None
    assert not peer.goaways

"""Replicas that answer before they have the whole request: their clients learn it at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import grpc
import pytest
from support.http2_frames import ErrorCode, data, headers
from support.raw_http2 import Peer, call_fields, get_fields, prefixed
from support.routing import OK, RunningRouter, ScriptedReplica, running_router
from support.wires import running_wire

from modelserver.wire.limits import WireLimits

HEAD = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\nretry-after: 7\r\ncontent-length: 16\r\n\r\n"
BODY = b'{"error":"what"}'
MIB = 1 << 20


class EarlyReplica(ScriptedReplica):
    """Answers a request when it has a part of its body; then it reads on, or closes and leaves the rest unread."""

    def __init__(self, status: int, *, closes: bool, in_parts: bool) -> None:
        self._head, self._closes, self._in_parts = HEAD % status, closes, in_parts
        super().__init__(lambda _replica, _connection, _request: None)

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), closing(connection):
            while received := connection.recv(MIB):
                if received.startswith(b"GET /v2/health/ready"):
                    connection.sendall(OK)
                    continue
                if self._in_parts:
                    connection.sendall(self._head)
                    time.sleep(0.02)
                    connection.sendall(BODY)
                else:
                    connection.sendall(self._head + BODY)
                if not self._closes:
                    while connection.recv(MIB):
                        pass
                return


@pytest.fixture(params=["reads on", "in parts", "closes"])
def early(request: pytest.FixtureRequest) -> Iterator[RunningRouter]:
    replica = EarlyReplica(429, closes=request.param == "closes", in_parts=request.param == "in parts")
    try:
        with running_router((replica.url,)) as router:
            yield router
    finally:
        replica.close()


@pytest.mark.parametrize("framing", [b"content-length: 33554432\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"])
def test_an_upload_over_http_1_ends_with_the_answer(early: RunningRouter, framing: bytes) -> None:
    host, port = early.http_url.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\n" + framing)
        piece = bytes(MIB) if b"length" in framing else b"100000\r\n" + bytes(MIB) + b"\r\n"
        connection.sendall(piece + piece)
        # It sends no more, and does not end its request: the answer comes, and then the end.
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert body == BODY
        fields = head.lower().split(b"\r\n")
        assert b"retry-after: 7" in fields
        assert b"connection: close" in fields
    counts = early.router.replicas.counts
    assert (counts.num_lost, counts.num_active) == (0, 0)


def test_an_upload_over_http_2_ends_with_the_answer(early: RunningRouter) -> None:
    host, port = early.http_url.split(":")
    with Peer((host, int(port))) as peer:
        fields = get_fields("/v2/models/m/infer", method="POST")
        peer.send(headers(1, fields, end=False), data(1, bytes(16_384)), data(1, bytes(16_384)))
        answer = peer.expect_answer(1)
        assert (answer.status, answer.body) == (429, BODY)
        peer.expect_reset(1, ErrorCode.NO_ERROR)
        # The connection goes on.
        peer.get(3, "/v2/health/live")
        assert peer.expect_answer(3).status == 200


def test_an_upload_over_grpc_ends_with_the_status() -> None:
    """A replica refuses a message by its announced length; the client has sent only the beginning."""
    with running_wire(limits=WireLimits(max_message_bytes=MIB)) as replica:
        host, port = replica.address
        with running_router((f"{host}:{port}",)) as router:
            host, port = router.grpc_url.split(":")
            with Peer((host, int(port))) as peer:
                message = prefixed(bytes(4000), length=8 * MIB)
                peer.send(headers(1, call_fields("Echo"), end=False), data(1, message))
                answer = peer.expect_answer(1)
                assert answer.grpc_status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                peer.expect_reset(1, ErrorCode.NO_ERROR)
                peer.call(3, "Echo", b"abc")
                assert peer.expect_answer(3).messages == [b"abc"]

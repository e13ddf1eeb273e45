"""Replicas that speak HTTP/2 badly, or leave, and what gRPC clients of the router learn of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest
from support.http2_frames import (
    ErrorCode,
    Flag,
    Frame,
    FrameType,
    Setting,
    block,
    continuation,
    data,
    encode,
    goaway,
    headers,
    ping,
    push_promise,
    rst_stream,
    settings,
    settings_ack,
    window_update,
)
from support.raw_http2 import Peer, prefixed
from support.routing import OK, RunningRouter, ScriptedReplica, read_request, running_router
from support.waiting import until_true

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = [(":status", "200"), ("content-type", "application/grpc")]
OK_TRAILERS = [("grpc-status", "0")]
MESSAGE = prefixed(b"abc")


def answer(stream_id: int) -> bytes:
    """A complete answer: MESSAGE, and OK."""
    return encode([headers(stream_id, HEAD, end=False), data(stream_id, MESSAGE), headers(stream_id, OK_TRAILERS)])


class Call:
    """A call as a replica has it: by its first frame, its HEADERS."""

    def __init__(self, connection: socket.socket, stream_id: int, number: int) -> None:
        self.connection = connection
        self.stream_id = stream_id
        # Of all calls of the replica, from 1.
        self.number = number

    def send(self, *frames: Frame | bytes) -> None:
        self.connection.sendall(b"".join(each if isinstance(each, bytes) else each.encode() for each in frames))

    def answer(self) -> None:
        self.send(answer(self.stream_id))


Script = Callable[[Call], object]


class H2Replica(ScriptedReplica):
    """Gives each call to `script` when it is complete, or with `is_early` when it begins. `frames` are all it got."""

    def __init__(self, script: Script, greeting: bytes = settings().encode(), *, is_early: bool = False) -> None:
        self.script, self.greeting, self.is_early = script, greeting, is_early
        self.frames: list[Frame] = []
        self.num_calls = 0
        super().__init__(lambda _replica, _connection, _request: None)

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if connection.recv(3, socket.MSG_PEEK) == b"GET":
                while read_request(connection) is not None:
                    connection.sendall(OK)
                return
            connection.sendall(self.greeting)
            reader = connection.makefile("rb")
            assert reader.read(len(PREFACE)) == PREFACE
            while len(head := reader.read(9)) == 9:
                payload = reader.read(int.from_bytes(head[:3], "big"))
                frame = Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                self.frames.append(frame)
                if frame.type == FrameType.SETTINGS and not frame.is_ack:
                    connection.sendall(settings_ack().encode())
                elif frame.type == FrameType.HEADERS if self.is_early else frame.ends_stream:
                    self.num_calls += 1
                    self.script(Call(connection, frame.stream_id, self.num_calls))


@contextmanager
def routed(*replicas: H2Replica) -> Iterator[RunningRouter]:
    try:
        with running_router([each.url for each in replicas]) as router:
            yield router
    finally:
        for each in replicas:
            each.close()


@contextmanager
def calling(router: RunningRouter) -> Iterator[grpc.UnaryUnaryMultiCallable]:
    with grpc.insecure_channel(router.grpc_url) as channel:
        yield channel.unary_unary("/test.Wire/Echo")


def ask(router: RunningRouter, request: bytes = b"xyz") -> bytes | grpc.RpcError:
    """The answer, or the error."""
    with calling(router) as call:
        try:
            return call(request, timeout=20)
        except grpc.RpcError as error:
            return error


def once(first: Script) -> Script:
    """`first` gets the first call; all others are answered well."""
    return lambda call: first(call) if call.number == 1 else call.answer()


def in_small_pieces(call: Call) -> None:
    call.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in answer(call.stream_id):
        call.send(bytes([byte]))


def with_everything_allowed(call: Call) -> None:
    """Heads in parts, padding, priority, pings, frames of unknown kinds, DATA of one byte each."""
    stream_id, head, end = call.stream_id, block(HEAD), block(OK_TRAILERS)
    call.send(
        headers(stream_id, head[:3], end=False, end_headers=False, padding=7, depends_on=0),
        continuation(stream_id, head[3:5], end_headers=False),
        continuation(stream_id, head[5:]),
        ping(),
        Frame(0xBE, 0xFF, stream_id, b"unknown"),
        *[data(stream_id, MESSAGE[at : at + 1], padding=at) for at in range(len(MESSAGE))],
        data(stream_id, b""),
        settings({Setting.MAX_FRAME_SIZE: (1 << 24) - 1, Setting.HEADER_TABLE_SIZE: 0}),
        headers(stream_id, end[:1], end_headers=False),
        continuation(stream_id, end[1:]),
    )


@pytest.mark.parametrize("script", [in_small_pieces, with_everything_allowed])
def test_unusual_frames_are_read(script: Script) -> None:
    with routed(H2Replica(script)) as router, calling(router) as call:
        for _ in range(3):
            assert call(b"xyz", timeout=20) == b"abc"


@pytest.mark.parametrize("status", [5, 8])
def test_an_answer_of_trailers_only_is_passed_on(status: int) -> None:
    fields = [*HEAD, ("grpc-status", str(status)), ("grpc-message", "not%20here"), ("x-more", "1")]
    with routed(H2Replica(lambda call: call.send(headers(call.stream_id, fields)))) as router:
        error = ask(router)
        assert isinstance(error, grpc.RpcError)
        assert (error.code().value[0], error.details()) == (status, "not here")
        assert ("x-more", "1") in [(key, value) for key, value in error.trailing_metadata() or ()]


@pytest.mark.parametrize(
    "refusal",
    [
        lambda call: call.send(rst_stream(call.stream_id, ErrorCode.REFUSED_STREAM)),
        lambda call: call.send(goaway(max(0, call.stream_id - 2))),
        lambda call: call.send(headers(call.stream_id, [*HEAD, ("grpc-status", "14")])),
    ],
    ids=["refused stream", "goaway", "unavailable"],
)
def test_a_call_that_was_not_begun_goes_to_another_replica(refusal: Script) -> None:
    refusing, other = H2Replica(refusal), H2Replica(Call.answer)
    with routed(refusing, other) as router, calling(router) as call:
        assert {call(b"xyz", timeout=20) for _ in range(12)} == {b"abc"}
        counts = router.router.replicas.counts
        assert refusing.num_calls == counts.num_retries > 0
        assert (counts.num_lost, counts.num_active) == (0, 0)


def test_calls_that_a_leaving_replica_has_begun_are_answered() -> None:
    """A polite end: GOAWAY names the last call that the replica took; the others are sent to the next one."""
    begun: list[Call] = []

    def leave(call: Call) -> None:
        begun.append(call)
        if len(begun) == 6:
            call.send(goaway(begun[2].stream_id))
            for each in begun[:3]:
                each.answer()
        elif len(begun) > 6:
            call.answer()

    with routed(H2Replica(leave), H2Replica(leave)) as router, calling(router) as call:
        session = [("x-session-id", "one")]
        asked = [call.future(b"xyz", metadata=session, timeout=20) for _ in range(6)]
        assert [each.result() for each in asked] == [b"abc"] * 6
        assert router.router.replicas.counts.num_retries == 3
        assert begun[6].connection is not begun[0].connection


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (lambda call: call.send(rst_stream(call.stream_id, ErrorCode.INTERNAL_ERROR)), "INTERNAL_ERROR"),
        (lambda call: call.send(Frame(FrameType.RST_STREAM, 0, call.stream_id, b"")), "type 3 with 0 bytes"),
        (lambda call: call.send(Frame(FrameType.WINDOW_UPDATE, 0, 0, b"12")), "type 8 with 2 bytes"),
        (lambda call: call.send(window_update(call.stream_id, (1 << 31) - 1)), "over 2^31-1"),
        (lambda call: call.send(Frame(FrameType.GOAWAY, 0, 0, b"123")), "type 7"),
        (lambda call: call.send(settings({Setting.MAX_FRAME_SIZE: 1})), "MAX_FRAME_SIZE"),
        (lambda call: call.send(headers(call.stream_id, b"\xff\xff")), "HTTP/2"),
        (lambda call: call.send(continuation(call.stream_id, b"")), "continues nothing"),
        (lambda call: call.send(push_promise(call.stream_id, 2, [(":path", "/")])), "pushes"),
        (lambda call: call.send(Frame(FrameType.DATA, Flag.PADDED, call.stream_id, b"\x09abc")), "padding"),
        (lambda call: call.send(Frame(FrameType.HEADERS, 4, call.stream_id, b"", length=1 << 19)), "524288 bytes"),
        (lambda call: call.send(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "broke a rule"),
        (lambda call: call.connection.shutdown(socket.SHUT_RDWR), "closed the connection"),
    ],
)
def test_a_broken_rule_ends_the_call_and_not_the_router(breakage: Script, words: str) -> None:
    with routed(H2Replica(once(breakage))) as router:
        error = ask(router)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "may have been processed" in str(error.details())
        assert words in str(error.details())
        assert ask(router) == b"abc"


def test_more_than_the_announced_window_ends_the_call() -> None:
    def flood(call: Call) -> None:
        call.send(headers(call.stream_id, HEAD, end=False))
        for _ in range(100):
            call.send(data(call.stream_id, bytes(1 << 16)))

    with routed(H2Replica(once(flood))) as router:
        host, port = router.grpc_url.split(":")
        with Peer((host, int(port))) as peer:
            # It takes 64 KiB, and the router as much as it has told the replica.
            peer.call(1, "Stream", b"xyz")
            assert peer.expect_answer(1).grpc_status == grpc.StatusCode.UNAVAILABLE.value[0]
        assert ask(router) == b"abc"


@pytest.mark.parametrize("window", [0, 1, 1000])
def test_a_request_waits_for_the_windows_of_its_replica(window: int) -> None:
    replica = H2Replica(Call.answer, settings({Setting.INITIAL_WINDOW_SIZE: window}).encode())
    request = bytes(3000)
    with routed(replica) as router, calling(router) as call:
        asked = call.future(request, timeout=20)
        until_true(lambda: any(each.type == FrameType.HEADERS for each in replica.frames), "the call has begun")
        until_true(lambda: _num_data(replica) == window, "the window is used")
        connection = replica._connections[-1]
        connection.sendall(encode([settings({Setting.INITIAL_WINDOW_SIZE: window + 2000}), window_update(1, 5000)]))
        assert asked.result() == b"abc"
        assert _num_data(replica) == 5 + len(request)


def _num_data(replica: H2Replica) -> int:
    return sum(len(each.payload) for each in replica.frames if each.type == FrameType.DATA)


def test_an_early_answer_ends_an_upload_that_waits_for_a_window() -> None:
    """The whole request has come, and most of it waits here: the replica learns that no more follows."""

    def refuse(call: Call) -> None:
        call.send(headers(call.stream_id, [*HEAD, ("grpc-status", "8"), ("grpc-message", "too large")]))

    replica = H2Replica(refuse, settings({Setting.INITIAL_WINDOW_SIZE: 100}).encode(), is_early=True)
    with routed(replica) as router:
        error = ask(router, bytes(200_000))
        assert isinstance(error, grpc.RpcError)
        assert error.details() == "too large"
        until_true(lambda: rst_stream(1, ErrorCode.NO_ERROR) in replica.frames, "the stream is reset")
        assert router.router.replicas.counts.num_active == 0


def test_a_replica_with_few_calls_at_once_gets_further_connections() -> None:
    held: list[Call] = []

    def hold(call: Call) -> None:
        held.append(call)
        if len(held) == 6:
            for each in held:
                each.answer()

    replica = H2Replica(hold, settings({Setting.MAX_CONCURRENT_STREAMS: 2}).encode())
    with routed(replica) as router, calling(router) as call:
        asked = [call.future(b"xyz", timeout=20) for _ in range(6)]
        assert [each.result() for each in asked] == [b"abc"] * 6
        assert len({id(each.connection) for each in held}) == 3


@pytest.mark.parametrize(
    "greeting",
    [
        settings({Setting.MAX_CONCURRENT_STREAMS: 0}).encode(),
        settings().encode() + goaway().encode(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["no calls", "goaway", "another protocol"],
)
def test_a_replica_that_takes_no_calls_is_passed_over(greeting: bytes) -> None:
    with routed(H2Replica(Call.answer, greeting), H2Replica(Call.answer)) as router, calling(router) as call:
        assert {call(b"xyz", timeout=20) for _ in range(10)} == {b"abc"}
        assert router.router.replicas.counts.num_lost == 0


def test_a_replica_that_cannot_be_called_is_told() -> None:
    with routed(H2Replica(Call.answer, settings({Setting.MAX_CONCURRENT_STREAMS: 0}).encode())) as router:
        error = ask(router)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE

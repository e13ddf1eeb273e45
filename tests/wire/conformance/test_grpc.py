"""gRPC over HTTP/2 (PROTOCOL-HTTP2.md of gRPC): what each client's bytes lead to, on our wire and on grpcio's.

Where both differ the table says so: the reference is laxer at some points and stricter at others.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.http2_frames import DEFAULT_WINDOW_BYTES, ErrorCode, Frame, data, headers, rst_stream, window_update
from support.raw_http2 import Answer, Peer, call_fields, prefixed
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import WireLimits

MAX_MESSAGE_BYTES = 100_000
LIMITS = WireLimits(max_message_bytes=MAX_MESSAGE_BYTES)


@pytest.fixture(scope="module", params=["native-asyncio", "native-uvloop", "grpcio-asyncio"])
def wire(request: pytest.FixtureRequest) -> Iterator[RunningWire]:
    """Our wire on both loops, and the reference."""
    kind, _, loop = request.param.partition("-")
    with running_wire(kind, loop=loop, limits=LIMITS) as running:
        yield running


@dataclass(frozen=True)
class Ends:
    """How a call ends: a gRPC status, with an HTTP status other than 200 if any; or only an HTTP status; or a reset.

    Nothing of it: it does not end.
    """

    status: int | None = None
    http: int | None = None
    reset: int | None = None
    message: bytes | None = None
    # Fields that come with the status.
    has: Mapping[str, str] = field(default_factory=dict)

    def check(self, peer: Peer, stream_id: int = 1) -> None:
        if self == UNANSWERED:
            peer.expect_nothing_on(stream_id)
            return
        if self.reset is not None:
            peer.expect_reset(stream_id, self.reset)
            assert peer.answer(stream_id).fields is None
            return
        answer = peer.expect_answer(stream_id)
        assert answer.status == (self.http or 200)
        if self.status is not None:
            assert answer.grpc_status == self.status, f"{answer.grpc_status}: {answer.grpc_message}"
        if self.message is not None:
            assert answer.messages == [self.message]
        for name, value in self.has.items():
            assert (answer.trailers or answer.fields or {})[name] == value
        peer.expect_alive()


def row(name: str, sent: list[Frame], native: Ends, grpcio: Ends | None = None) -> Any:
    """`grpcio` is what the reference does, where it differs."""
    return pytest.param(sent, native, grpcio or native, id=name)


OK = Ends(0, message=b"abc")
# The asyncio server of the reference leaves calls without a complete message open until the client leaves.
UNANSWERED = Ends()


def echo(
    *more: tuple[str, str],
    body: bytes = prefixed(b"abc"),
    fields: Mapping[str, str | None] | None = None,
    method: str = "Echo",
) -> list[Frame]:
    """A call of Echo; `fields` replaces some of its head, or with None leaves them out."""
    replaced = fields or {}
    head = [(name, replaced.get(name, value)) for name, value in call_fields(method)]
    return [
        headers(1, [(name, value) for name, value in head if value is not None] + list(more), end=False),
        data(1, body, end=True),
    ]


def content_type(value: str | None) -> list[Frame]:
    return echo(fields={"content-type": value})


def timeout(value: str) -> list[Frame]:
    return echo(("grpc-timeout", value))


HEADS = [
    row("content-type-grpc", content_type("application/grpc"), OK),
    row("content-type-with-a-codec", content_type("application/grpc+proto"), OK),
    row("content-type-with-a-parameter", content_type("application/grpc;charset=utf-8"), OK),
    row("content-type-grpc-web", content_type("application/grpc-web"), Ends(http=415), OK),
    row("content-type-grpc-web-text", content_type("application/grpc-web-text+proto"), Ends(http=415), OK),
    row("content-type-that-begins-like-it", content_type("application/grpcx"), Ends(http=415), OK),
    # What is no gRPC at all is a request of the REST handlers, on the same port.
    row("content-type-of-rest", content_type("application/json"), Ends(http=404), OK),
    row("content-type-missing", content_type(None), Ends(http=404), OK),
    row("te-missing", echo(fields={"te": None}), OK, Ends(reset=ErrorCode.INTERNAL_ERROR)),
    row(
        "te-gzip",
        echo(fields={"te": "gzip"}),
        Ends(reset=ErrorCode.PROTOCOL_ERROR),
        Ends(13),
    ),
    row("method-get", echo(fields={":method": "GET"}), Ends(13, http=405), Ends(reset=ErrorCode.INTERNAL_ERROR)),
    row("path-of-an-unknown-method", echo(fields={":path": "/test.Wire/Nothing"}), Ends(12)),
    row("path-of-an-unknown-service", echo(fields={":path": "/test.Nothing/Echo"}), Ends(12)),
    row("path-of-one-part", echo(fields={":path": "/Echo"}), Ends(12)),
    row("path-with-a-query", echo(fields={":path": "/test.Wire/Echo?a=b"}), Ends(12)),
    row("scheme-https-on-a-plain-port", echo(fields={":scheme": "https"}), OK),
    row("authority-missing", echo(fields={":authority": None}), OK, Ends(reset=ErrorCode.INTERNAL_ERROR)),
]

TIMEOUTS = [
    *(row(f"timeout-{value}", timeout(value), OK) for value in ("1H", "1M", "10S", "9999m", "99999999u", "99999999n")),
    # Eight digits are allowed; more are a long time all the same.
    row("timeout-nine-digits", timeout("000000010S"), OK),
    row("timeout-fifteen-digits", timeout("999999999999999H"), OK),
    *(
        row(f"timeout-{name}", timeout(value), Ends(13))
        for name, value in {
            "without-unit": "10",
            "without-number": "S",
            "unknown-unit": "10X",
            "lower-case-unit": "10s",
            "negative": "-1S",
            "fraction": "1.5S",
            "hex": "0x1S",
            "empty": "",
        }.items()
    ),
    row("timeout-blank-between", timeout("1 S"), Ends(13), OK),
    row("deadline-of-nothing", timeout("0n"), Ends(4)),
    row("deadline-that-passes", echo(("grpc-timeout", "20m"), method="Hold"), Ends(4)),
]

GZIP = ("grpc-encoding", "gzip")
DEFLATE = ("grpc-encoding", "deflate")
ZEROS = bytes(MAX_MESSAGE_BYTES * 10)

MESSAGES = [
    row("message-empty", echo(body=prefixed(b"")), Ends(0, message=b"")),
    row("message-of-the-limit", echo(body=prefixed(bytes(65530)), method="Ignore"), Ends(0, message=b"65530")),
    row("no-message", echo(body=b""), Ends(12), UNANSWERED),
    row("prefix-cut-off", echo(body=b"\0\0\0"), Ends(13), UNANSWERED),
    row("message-cut-off", echo(body=prefixed(b"abc", length=5)), Ends(13), UNANSWERED),
    row("two-messages", echo(body=prefixed(b"abc") + prefixed(b"def")), Ends(12), OK),
    row("message-and-half-a-second", echo(body=prefixed(b"abc") + b"\0\0"), Ends(12), OK),
    row("flag-2", echo(body=prefixed(b"abc", flag=2)), Ends(13), Ends(0)),
    row("flag-255", echo(body=prefixed(b"abc", flag=255)), Ends(13), Ends(0)),
    row("compressed-without-encoding", echo(body=prefixed(b"abc", flag=1)), Ends(13)),
    row("compressed-as-identity", echo(("grpc-encoding", "identity"), body=prefixed(b"abc", flag=1)), Ends(13)),
    row("gzip", echo(GZIP, body=prefixed(gzip.compress(b"abc"), flag=1)), OK),
    row("deflate", echo(DEFLATE, body=prefixed(zlib.compress(b"abc"), flag=1)), OK),
    row("gzip-announced-and-not-used", echo(GZIP), OK),
    row("gzip-of-nothing", echo(GZIP, body=prefixed(gzip.compress(b""), flag=1)), Ends(0, message=b"")),
    row("gzip-broken", echo(GZIP, body=prefixed(b"no gzip", flag=1)), Ends(13)),
    row("gzip-cut-off", echo(GZIP, body=prefixed(gzip.compress(bytes(1000))[:-9], flag=1)), Ends(13)),
    row("gzip-called-deflate", echo(DEFLATE, body=prefixed(gzip.compress(b"abc"), flag=1)), Ends(13)),
    row("gzip-bomb", echo(GZIP, body=prefixed(gzip.compress(ZEROS), flag=1)), Ends(8)),
    row("deflate-bomb", echo(DEFLATE, body=prefixed(zlib.compress(ZEROS), flag=1)), Ends(8)),
    row("unknown-encoding", echo(("grpc-encoding", "snappy"), body=prefixed(b"abc", flag=1)), Ends(12), Ends(13)),
    row("unknown-encoding-not-used", echo(("grpc-encoding", "snappy")), OK, Ends(13)),
    row("message-too-large", echo(body=prefixed(bytes(MAX_MESSAGE_BYTES + 1))), Ends(8)),
    row("message-announced-too-large", echo(body=prefixed(b"", length=MAX_MESSAGE_BYTES + 1)), Ends(8), UNANSWERED),
    row("message-of-4-GiB-announced", echo(body=prefixed(b"", length=(1 << 32) - 1)), Ends(8), UNANSWERED),
]


def test_the_table_names_each_point_once() -> None:
    names = [parameter.id for parameter in (*HEADS, *TIMEOUTS, *MESSAGES)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("sent", "native", "grpcio"), [*HEADS, *TIMEOUTS, *MESSAGES])
def test_point(wire: RunningWire, sent: list[Frame], native: Ends, grpcio: Ends) -> None:
    with Peer(wire.address) as peer:
        peer.send(*sent)
        (grpcio if wire.is_reference else native).check(peer)
        # Whatever it was, the next call is served.
        peer.call(3, "Echo", b"after it")
        assert peer.expect_answer(3).messages == [b"after it"]


@pytest.fixture
def peer(wire: RunningWire) -> Iterator[Peer]:
    with Peer(wire.address) as connected:
        yield connected


def metadata_of(peer: Peer, *more: tuple[str, str], stream_id: int = 1) -> dict[str, Any]:
    peer.call(stream_id, "Metadata", b"", *more)
    found: dict[str, Any] = json.loads(peer.expect_answer(stream_id).messages[0])
    return found


def encoded(value: bytes, *, padding: bool = False) -> str:
    text = base64.b64encode(value).decode()
    return text if padding else text.rstrip("=")


@pytest.mark.parametrize("padding", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize(
    "value", [b"", b"a", b"ab", b"abc", bytes(range(256))], ids=lambda value: f"{len(value)}-bytes"
)
def test_binary_metadata(peer: Peer, value: bytes, padding: bool) -> None:
    assert metadata_of(peer, ("x-bin", encoded(value, padding=padding)))["x-bin"] == list(value)


@pytest.mark.parametrize("value", ["a", "ab*=", "a b c"])
def test_bad_binary_metadata(peer: Peer, value: str) -> None:
    peer.call(1, "Metadata", b"", ("x-bin", value))
    Ends(13).check(peer)


def test_binary_metadata_split_at_commas(peer: Peer, wire: RunningWire) -> None:
    """Of equal keys the last counts; the reference refuses commas."""
    both = f"{encoded(b'first')},{encoded(b'second')}"
    if wire.is_reference:
        peer.call(1, "Metadata", b"", ("x-bin", both))
        Ends(13).check(peer)
    else:
        assert metadata_of(peer, ("x-bin", both))["x-bin"] == list(b"second")


def test_metadata_of_a_handler(peer: Peer) -> None:
    """What belongs to the protocol is no metadata; the last of equal keys counts."""
    found = metadata_of(
        peer,
        ("x-name", "first"),
        ("x-name", "value, with comma"),
        ("grpc-timeout", "10S"),
        ("grpc-accept-encoding", "identity, gzip"),
        ("grpc-encoding", "identity"),
    )
    assert found["x-name"] == "value, with comma"
    assert found["has-deadline"] == "True"
    assert not [name for name in found if name.startswith((":", "grpc-")) or name in ("te", "content-type", "host")]


def test_metadata_is_of_its_own_call(peer: Peer) -> None:
    """Equal blocks are remembered; calls that differ in one value must not share anything."""
    for number in range(20):
        found = metadata_of(peer, ("authorization", f"token {number % 3}"), stream_id=2 * number + 1)
        assert found["authorization"] == f"token {number % 3}"


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("plain text", "plain text"),
        ("100 %", "100 %25"),
        ("é", "%C3%A9"),
        ("漢", "%E6%BC%A2"),
        ("two\nlines\r\n", "two%0Alines%0D%0A"),
        ("\x7f\t~", "%7F%09~"),
    ],
    ids=["plain", "percent", "latin", "cjk", "lines", "control"],
)
def test_status_text(peer: Peer, text: str, sent: str) -> None:
    peer.call(1, "Fail", f"5 {text}".encode())
    answer = peer.expect_answer(1)
    assert (answer.grpc_status, answer.grpc_message) == (5, sent)


def test_status_without_text(peer: Peer) -> None:
    peer.call(1, "Fail", b"9")
    answer = peer.expect_answer(1)
    assert (answer.grpc_status, answer.grpc_message) == (9, "")


def test_a_long_status_text_arrives_or_is_cut(peer: Peer) -> None:
    """Longer than one frame; a peer may announce less than that."""
    text = "é" * 3000
    peer.call(1, "Fail", f"5 {text}".encode())
    answer = peer.expect_answer(1)
    assert answer.grpc_status == 5
    assert answer.grpc_message.startswith("%C3%A9" * 100)


def test_shape_of_an_answer(peer: Peer) -> None:
    peer.call(1, "Echo", b"abc")
    answer = peer.expect_answer(1)
    assert answer.fields is not None
    assert answer.fields[":status"] == "200"
    assert answer.fields["content-type"] == "application/grpc"
    assert answer.trailers is not None
    assert answer.trailers["grpc-status"] == "0"
    assert answer.messages == [b"abc"]


@pytest.mark.parametrize(
    "sent", [timeout("x"), echo(fields={":path": "/test.Wire/No"}), echo(method="Fail", body=prefixed(b"5 x"))]
)
def test_errors_before_a_message_are_trailers_only(peer: Peer, sent: list[Frame]) -> None:
    peer.send(*sent)
    answer = peer.expect_answer(1)
    assert answer.is_trailers_only
    assert answer.status == 200


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([headers(1, call_fields("Nothing"), end=False)], id="unknown-method"),
        pytest.param(
            [headers(1, call_fields("Echo"), end=False), data(1, prefixed(bytes(MAX_MESSAGE_BYTES + 1)))],
            id="message-too-large",
        ),
        pytest.param(
            [headers(1, call_fields("Echo", ("grpc-timeout", "0n")), end=False)],
            id="deadline",
        ),
    ],
)
def test_an_early_end_is_followed_by_a_reset(peer: Peer, sent: list[Frame]) -> None:
    """The client has not ended its side: RST_STREAM tells it that the rest is not wanted, and is no failure."""
    peer.send(*sent)
    assert peer.expect_answer(1).is_trailers_only
    peer.until(lambda: 1 in peer.resets, "RST_STREAM")
    assert peer.resets[1] in (ErrorCode.NO_ERROR, ErrorCode.CANCEL)
    peer.send(data(1, b"in flight", end=True))
    peer.call(3, "Echo", b"abc")
    assert peer.expect_answer(3).messages == [b"abc"]


def test_a_message_in_many_frames(peer: Peer) -> None:
    sent = prefixed(bytes(range(256)) * 4)
    peer.send(headers(1, call_fields("Echo"), end=False))
    peer.send(*(data(1, sent[at : at + 7]) for at in range(0, len(sent), 7)), data(1, end=True))
    assert peer.expect_answer(1).messages == [sent[5:]]


def test_a_passed_deadline_cancels_the_handler(peer: Peer, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    peer.call(1, "Hold", b"abc", ("grpc-timeout", "20m"))
    assert peer.expect_answer(1).grpc_status == 4
    wire.until(lambda: wire.grpc.num_cancelled == before + 1, "the handler was cancelled")


def test_a_reset_cancels_the_handler(peer: Peer, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    peer.call(1, "Hold", b"abc")
    wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
    peer.send(rst_stream(1))
    wire.until(lambda: wire.grpc.num_cancelled == before + 1, "the handler was cancelled")
    peer.expect_alive()
    assert not peer.resets
    assert peer.answer(1).fields is None


def test_messages_of_a_stream_come_one_by_one(peer: Peer) -> None:
    """Answers come before the client has ended; its end is the end of the messages."""
    peer.send(headers(1, call_fields("Chat"), end=False))
    for number in range(5):
        peer.send(data(1, prefixed(b"message %d" % number)))
        peer.until(lambda: len(peer.answer(1).messages) == number + 1, "an answer")  # noqa: B023
    peer.send(data(1, end=True))
    answer = peer.expect_answer(1)
    assert answer.grpc_status == 0
    assert answer.messages == [b"message %d" % number for number in range(5)]


def test_a_stream_of_messages_in_one_frame_and_one_message_in_many(peer: Peer) -> None:
    messages = [bytes([65 + number]) * number for number in range(20)]
    sent = b"".join(map(prefixed, messages))
    peer.send(headers(1, call_fields("Chat"), end=False), data(1, sent, end=True))
    assert peer.expect_answer(1).messages == messages
    peer.send(headers(3, call_fields("Chat"), end=False))
    peer.send(*(data(3, sent[at : at + 3]) for at in range(0, len(sent), 3)), data(3, end=True))
    assert peer.expect_answer(3).messages == messages


def test_a_stream_compressed_message_by_message(peer: Peer) -> None:
    """Each message is compressed on its own, or not at all."""
    body = prefixed(gzip.compress(b"one"), flag=1) + prefixed(b"two") + prefixed(gzip.compress(b"three"), flag=1)
    peer.send(headers(1, call_fields("Chat", GZIP), end=False), data(1, body, end=True))
    assert peer.expect_answer(1).messages == [b"one", b"two", b"three"]


def test_a_stream_without_a_message(peer: Peer) -> None:
    peer.send(headers(1, call_fields("Chat")))
    answer = peer.expect_answer(1)
    assert (answer.grpc_status, answer.messages) == (0, [])


def test_a_stream_of_many_messages_each_way(peer: Peer) -> None:
    peer.send(window_update(0, 1 << 24))
    peer.call(1, "Count", b"1000 100")
    peer.until(lambda: len(peer.answer(1).body) == DEFAULT_WINDOW_BYTES, "a full window")
    peer.send(window_update(1, 1 << 20))
    messages = peer.expect_answer(1).messages
    assert [int.from_bytes(message[:4], "big") for message in messages] == list(range(1000))
    peer.send(headers(3, call_fields("Sum"), end=False))
    for _ in range(10):
        peer.send(data(3, prefixed(b"0123456789") * 100))
    peer.send(data(3, end=True))
    assert peer.expect_answer(3).messages == [b"1000 10000"]


def test_a_stream_that_fails_late(peer: Peer) -> None:
    peer.send(headers(1, call_fields("FailLate"), end=False), data(1, prefixed(b"abc")))
    answer = peer.expect_answer(1)
    assert answer.messages == [b"abc"]
    assert answer.trailers is not None
    assert (answer.grpc_status, answer.grpc_message) == (9, "too late: 100 %25 %0A %C3%A9 %E6%BC%A2")
    peer.until(lambda: 1 in peer.resets, "RST_STREAM")
    assert peer.resets[1] in (ErrorCode.NO_ERROR, ErrorCode.CANCEL)


def test_a_reset_cancels_a_stream(peer: Peer, wire: RunningWire) -> None:
    ended = len(wire.grpc.ended_streams)
    peer.send(headers(1, call_fields("Chat"), end=False), data(1, prefixed(b"abc")))
    peer.until(lambda: peer.answer(1).messages == [b"abc"], "the first answer")
    peer.send(rst_stream(1))
    wire.until(lambda: len(wire.grpc.ended_streams) > ended, "the handler ended")


def test_a_stream_has_a_deadline(peer: Peer, wire: RunningWire) -> None:
    ended = len(wire.grpc.ended_streams)
    peer.send(headers(1, call_fields("Chat", ("grpc-timeout", "50m")), end=False), data(1, prefixed(b"abc")))
    answer: Answer = peer.expect_answer(1)
    assert (answer.messages, answer.grpc_status) == ([b"abc"], 4)
    wire.until(lambda: len(wire.grpc.ended_streams) > ended, "the handler ended")


@pytest.mark.parametrize("body", [b"\0\0\0", prefixed(b"abc", length=9), prefixed(b"abc", flag=7)])
def test_a_stream_with_a_broken_message(peer: Peer, wire: RunningWire, body: bytes) -> None:
    """What came before it was answered."""
    peer.send(headers(1, call_fields("Chat"), end=False), data(1, prefixed(b"good") + body, end=True))
    if not wire.is_reference:
        assert peer.expect_answer(1).grpc_status == 13
    peer.call(3, "Echo", b"abc")
    assert peer.expect_answer(3).messages == [b"abc"]

"""HTTP/2 connections: noise, and frames of every kind of which some are wrong, in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TypeVar

import hpack
import pytest
from fuzz.http2_connection import TARGETS, answer, check_http2
from hypothesis import given, settings
from hypothesis import strategies as st
from support import http2_frames as frames
from support.http2_frames import Frame, Setting

Choice = TypeVar("Choice")
# Not one of those that are tried more often than others.
_ODD = 11


def mostly(usual: list[Choice], odd: list[Choice]) -> st.SearchStrategy[Choice]:
    """Fourteen of fifteen are usual: a connection is only read as far as its first fault."""
    return st.integers(0, 14).flatmap(lambda number: st.sampled_from(usual if number != _ODD else odd))


def often(usual: st.SearchStrategy[Choice], odd: st.SearchStrategy[Choice]) -> st.SearchStrategy[Choice]:
    """As `mostly`."""
    return st.integers(0, 14).flatmap(lambda number: usual if number != _ODD else odd)


def call_of(method: str) -> list[tuple[str, str]]:
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", f"/test.Wire/{method}"), (":authority", "host")]
    return [*pseudo, ("content-type", "application/grpc"), ("te", "trailers")]


ANY_ID = st.sampled_from([0, 1, 2, 3, 5, 7])
ECHO, CHAT, LARGE, UNKNOWN = map(call_of, ["Echo", "Chat", "Large", "Unknown"])
REST = ECHO[:4]
HEADS = mostly([ECHO, ECHO, CHAT, CHAT, LARGE, REST, UNKNOWN], [REST[1:], REST[::-1], [("grpc-status", "0")]])
MORE_FIELDS = mostly(
    [[], [("grpc-timeout", "5S")], [("key-bin", "AA"), ("key", "value")], [("grpc-encoding", "gzip")]],
    [
        [("grpc-timeout", "0n")],
        [("grpc-timeout", "soon")],
        [("content-length", "7")],
        [("key-bin", "*")],
        [("connection", "close")],
        [("Upper", "")],
        [(":late", "")],
        [("long", "v" * 20_000)],
        [("long", "v" * 70_000)],
    ],
)
MESSAGES = often(
    st.lists(st.sampled_from([b"\0\0\0\0\2ab", b"\0\0\0\0\0", b"\0\0\0\0\2", b"cd"]), max_size=3).map(b"".join),
    st.sampled_from([b"\1\0\0\0\1a", b"\2\0\0\0\0", b"\0\xff\xff\xff\xff", b"\0\0\0\0\5ab"]) | st.binary(max_size=20),
)
PADDING = mostly([None], [0, 1, 255])
LENGTHS = st.sampled_from([0, 1, 5, 100, 16_384, 65_535, 1 << 20, (1 << 31) - 1])
NUMBERS = st.sampled_from([0, 2, (1 << 31), (1 << 32) - 1])
SETTINGS = often(
    st.lists(
        st.tuples(st.sampled_from([Setting.HEADER_TABLE_SIZE, Setting.INITIAL_WINDOW_SIZE, 0xFE03]), LENGTHS),
        max_size=3,
    ),
    st.lists(st.tuples(st.sampled_from(list(Setting)), LENGTHS | NUMBERS), min_size=1, max_size=3),
).map(frames.settings)
INCREMENTS = mostly([1, 5, 100, 65_535, 1 << 20], [0, (1 << 31) - 1, 1 << 31])
ODD_FRAMES = st.one_of(
    st.builds(frames.data, ANY_ID, MESSAGES, end=st.booleans(), padding=PADDING),
    st.builds(frames.ping, st.binary(max_size=9)),
    st.builds(frames.window_update, ANY_ID, INCREMENTS),
    st.builds(frames.rst_stream, ANY_ID, st.integers(0, 20)),
    st.builds(frames.priority, ANY_ID, ANY_ID),
    st.builds(frames.goaway, ANY_ID, st.integers(0, 20), st.binary(max_size=5)),
    st.builds(frames.continuation, ANY_ID, st.binary(max_size=10), end_headers=st.booleans()),
    st.builds(Frame, st.integers(0, 12), st.integers(0, 255), ANY_ID, st.binary(max_size=20)),
)
USUAL_KINDS = ["call", "call", "call", "request", "data", "data", "end", "window", "ping", "priority"]
KINDS = mostly(USUAL_KINDS, ["odd", "reset", "settings"])


class Client:
    """Says what a client may say, with now and then something that it may not."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._encoder = hpack.Encoder()
        self._next_id = 1
        self._open_ids: list[int] = []

    def say(self, kind: str) -> list[Frame]:
        draw = self._draw
        if kind in ("data", "end", "reset") and not self._open_ids:
            kind = "request"
        match kind:
            case "request":
                return self._request()
            case "call":
                said = self._request()
                if said[0].stream_id in self._open_ids:
                    self._open_ids.remove(said[0].stream_id)
                    said.append(frames.data(said[0].stream_id, b"\0\0\0\0\2ab", end=True, padding=draw(PADDING)))
                return said
            case "data" | "end":
                stream_id = draw(st.sampled_from(self._open_ids))
                if kind == "end":
                    self._open_ids.remove(stream_id)
                return [frames.data(stream_id, draw(MESSAGES), end=kind == "end", padding=draw(PADDING))]
            case "reset":
                return [frames.rst_stream(self._open_ids.pop())]
            case "window":
                return [frames.window_update(draw(st.sampled_from([0, *self._open_ids])), draw(INCREMENTS))]
            case "ping":
                return [frames.ping()]
            case "settings":
                return [draw(SETTINGS)]
            case "priority":
                return [frames.priority(self._next_id + 10)]
        return [draw(ODD_FRAMES)]

    def _request(self) -> list[Frame]:
        draw = self._draw
        block = self._encoder.encode([*draw(HEADS), *draw(MORE_FIELDS)], huffman=draw(st.booleans()))
        stream_id = draw(mostly([self._next_id, self._next_id + 2], [1, 2, 0, 3]))
        ends = draw(mostly([False], [True]))
        if not ends:
            self._open_ids.append(stream_id)
        self._next_id = max(self._next_id, stream_id) + 2
        cuts = draw(often(st.just(set()), st.sets(st.integers(0, len(block)), max_size=4)))
        pieces = [block[start:end] for start, end in pairwise([0, *sorted(cuts), len(block)])]
        is_whole = len(pieces) == 1
        depends_on = draw(mostly([None], [0, 1]))
        first = frames.headers(stream_id, pieces[0], end=ends, end_headers=is_whole, depends_on=depends_on)
        return [
            first,
            *[frames.continuation(stream_id, piece, end_headers=piece is pieces[-1]) for piece in pieces[1:]],
        ]


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Frame by frame; header blocks share a table, as those of one client do."""
    client = Client(draw)
    # Room for all answers: which of them gets how much of what is scarce depends on when it is ready.
    room = frames.window_update(0, 1 << 30)
    said = [frames.PREFACE + draw(SETTINGS).encode() + room.encode()]
    kinds = draw(st.sampled_from([st.sampled_from(USUAL_KINDS), KINDS]))
    for kind in draw(st.lists(kinds, min_size=draw(st.integers(0, 10)), max_size=20)):
        said += [frame.encode() for frame in client.say(kind)]
    return said


@pytest.mark.parametrize("name", list(TARGETS))
@given(data=st.binary(max_size=100))
def test_noise(name: str, data: bytes) -> None:
    TARGETS[name](data)


@settings(max_examples=150)
@given(conversations())
def test_frames_of_which_some_are_wrong(said: list[bytes]) -> None:
    check_http2(said)


@settings(max_examples=100)
@given(conversations(), st.data())
def test_damaged_frames(said: list[bytes], data: st.DataObject) -> None:
    stream = bytearray(b"".join(said))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(min(len(frames.PREFACE), len(stream) - 1), len(stream) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    size = data.draw(st.integers(1, 40))
    check_http2([bytes(stream[at : at + size]) for at in range(0, len(stream), size)])


@settings(max_examples=150)
@given(
    metadata=st.lists(st.sampled_from([("a", "1"), ("b", "2"), ("b", "3"), ("c", "4" * 1500)]), max_size=25),
    timeouts=mostly([("",)], [("", "5S"), ("5S", "6S", "7000m")]),
    table_size=mostly([4096], [0, 100]),
    is_plain=st.booleans(),
    is_huffman=st.booleans(),
)
def test_every_call_gets_its_own_metadata(
    metadata: list[tuple[str, str]], timeouts: tuple[str, ...], table_size: int, is_plain: bool, is_huffman: bool
) -> None:
    """Heads that repeat are remembered by their bytes, whose meaning changes with the table.

    The same bytes mean something else most often where only the metadata is in the table.
    """
    encoder = hpack.Encoder()
    encoder.header_table_size = table_size
    said = [frames.PREFACE + frames.settings().encode() + frames.window_update(0, 1 << 20).encode()]
    expected = {}
    for number, field in enumerate(metadata):
        stream_id, timeout = 2 * number + 1, timeouts[number % len(timeouts)]
        call = [*ECHO, *([("grpc-timeout", timeout)] if timeout else [])]
        block = encoder.encode([*[(name, value, is_plain) for name, value in call], field], huffman=is_huffman)
        said.append(frames.headers(stream_id, block, end=False).encode())
        said.append(frames.data(stream_id, b"\0\0\0\0\0", end=True).encode())
        expected[stream_id] = [list(field)]
    for stream_id, answered in answer([b"".join(said)]).streams.items():
        _, message, *_ = answered
        assert isinstance(message, bytes)
        _, seen = json.loads(message[5:])
        assert seen == expected.pop(stream_id)
    assert not expected

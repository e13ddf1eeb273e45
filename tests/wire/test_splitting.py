"""However a client's bytes are cut on their way, single bytes included, the same answers come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
from fuzz.conversation import converse, converse_from_start
from fuzz.http2_connection import Outcome, answer, frames_of, outcome_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http2_frames import PREFACE, FrameType
from support.replaying import recording, recordings
from support.twins import TWINS, using

from modelserver.wire.http1.connection import Http1Connection

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module", autouse=True, params=TWINS)
def twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frames are read and answers joined in C and in Python."""
    with using(request.param):
        yield


def cut(data: bytes, ends: set[int]) -> list[bytes]:
    """`data` in pieces that end at `ends`, taken modulo its length."""
    places = sorted({end % len(data) for end in ends} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


def http1_answer(pieces: list[bytes]) -> bytes:
    # Whether a client is invited to send a body depends on whether it has begun to.
    return converse(Http1Connection, pieces).replace(CONTINUE, b"")


@cache
def http1_whole(name: str) -> bytes:
    return http1_answer([recording("http1", name)])


RECORDED = [(protocol, name) for protocol in ("http1", "http2") for name in recordings(protocol)]
ENDS = st.sets(st.integers(0, 100_000), max_size=12)


@pytest.mark.parametrize("name", recordings("http1"))
def test_http1_byte_by_byte(name: str) -> None:
    data, whole = recording("http1", name), http1_whole(name)
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    assert http1_answer([data[at : at + 1] for at in range(len(data))]) == whole


@pytest.mark.parametrize("name", recordings("http1"))
@settings(max_examples=20)
@given(ends=ENDS)
def test_http1_in_pieces(name: str, ends: set[int]) -> None:
    assert http1_answer(cut(recording("http1", name), ends)) == http1_whole(name)


def http2_answer(pieces: list[bytes]) -> Outcome:
    """Without streams that the client cancelled: how far their answers had come depends on when it did."""
    outcome = answer(pieces)
    for frame in frames_of(b"".join(pieces).removeprefix(PREFACE)):
        if frame.type == FrameType.RST_STREAM:
            outcome.streams.pop(frame.stream_id, None)
    return outcome


@cache
def http2_whole(name: str) -> Outcome:
    return http2_answer([recording("http2", name)])


@pytest.mark.parametrize("name", recordings("http2"))
def test_http2_byte_by_byte(name: str) -> None:
    data, whole = recording("http2", name), http2_whole(name)
    assert not whole.goaways
    assert whole.streams
    assert http2_answer([data[at : at + 1] for at in range(len(data))]) == whole


@pytest.mark.parametrize("name", recordings("http2"))
@settings(max_examples=20)
@given(ends=ENDS)
def test_http2_in_pieces(name: str, ends: set[int]) -> None:
    assert http2_answer(cut(recording("http2", name), ends)) == http2_whole(name)


@pytest.mark.parametrize(("protocol", "name"), RECORDED)
def test_what_a_client_speaks_is_found_out_byte_by_byte(protocol: str, name: str) -> None:
    data = recording(protocol, name)
    written = converse_from_start([data[at : at + 1] for at in range(30)] + [data[30:]])
    if protocol == "http1":
        assert written.replace(CONTINUE, b"") == http1_whole(name)
    else:
        assert next(frames_of(written)).type == FrameType.SETTINGS
        assert outcome_of(written).streams.keys() >= http2_whole(name).streams.keys()


@pytest.mark.slow
@settings(max_examples=10_000)
@given(st.sampled_from(RECORDED), ENDS)
def test_all_in_pieces(client: tuple[str, str], ends: set[int]) -> None:
    protocol, name = client
    pieces = cut(recording(protocol, name), ends)
    if protocol == "http1":
        assert http1_answer(pieces) == http1_whole(name)
    else:
        assert http2_answer(pieces) == http2_whole(name)

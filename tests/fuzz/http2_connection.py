"""What must hold of an HTTP/2 connection for any bytes: used by the tests of the suite and by `fuzz.run`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import hpack
from fuzz.conversation import converse
from fuzz.parsers import pieces_of
from support.http2_frames import HEAD_BYTES, PREFACE, Flag, Frame, FrameType, settings

from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.limits import KeepaliveLimits, WireLimits

# How many pings are too many depends on what was sent between them.
_LIMITS = WireLimits(keepalive=KeepaliveLimits(max_ping_strikes=1000))
_START = PREFACE + settings().encode()


@dataclass
class Outcome:
    """What a peer got, apart from how answers of different streams and answers to PING were mixed.

    `streams` has for each stream what came on it, neighbouring DATA joined; `credit` the sums of WINDOW_UPDATE.
    """

    streams: dict[int, list[object]] = field(default_factory=lambda: defaultdict(list))
    control: list[tuple[int, int, bytes]] = field(default_factory=list)
    credit: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    goaways: list[bytes] = field(default_factory=list)


def frames_of(answer: bytes) -> Iterator[Frame]:
    """The frames of a server; raises AssertionError if the bytes are something else."""
    at = 0
    while at < len(answer):
        assert len(answer) - at >= HEAD_BYTES, "the answer ends within the head of a frame"
        length = int.from_bytes(answer[at : at + 3], "big")
        end = at + HEAD_BYTES + length
        assert end <= len(answer), "the answer ends within a frame"
        stream_id = int.from_bytes(answer[at + 5 : at + 9], "big")
        yield Frame(answer[at + 3], answer[at + 4], stream_id, answer[at + HEAD_BYTES : end])
        at = end


def outcome_of(answer: bytes) -> Outcome:
    """Read what a server sent, and check that a server may send it."""
    outcome, decoder = Outcome(), hpack.Decoder()
    ended: set[int] = set()
    for number, frame in enumerate(frames_of(answer)):
        assert number > 0 or frame.type == FrameType.SETTINGS, "the first frame is SETTINGS"
        if frame.stream_id and frame.type != FrameType.WINDOW_UPDATE:
            assert frame.stream_id not in ended or frame.type == FrameType.RST_STREAM, f"{frame} after its end"
            assert frame.stream_id % 2 == 1, f"{frame} on a stream that is no request"
        said = outcome.streams[frame.stream_id] if frame.stream_id else []
        match frame.type:
            case FrameType.HEADERS:
                assert frame.flags & Flag.END_HEADERS, "our blocks are short"
                said.append(tuple(decoder.decode(frame.payload, raw=True)))
            case FrameType.DATA:
                if said and isinstance(said[-1], bytes):
                    said[-1] += frame.payload
                elif frame.payload:
                    said.append(frame.payload)
            case FrameType.RST_STREAM:
                said.append(frame.number())
            case FrameType.WINDOW_UPDATE:
                outcome.credit[frame.stream_id] += frame.number()
            case FrameType.GOAWAY:
                outcome.goaways.append(frame.payload)
            case _:
                assert frame.type in (FrameType.SETTINGS, FrameType.PING), f"{frame} comes from a server"
                outcome.control.append((frame.type, frame.flags, frame.payload))
        if frame.ends_stream:
            ended.add(frame.stream_id)
            said.append("end")
    return outcome


def answer(pieces: list[bytes]) -> Outcome:
    return outcome_of(converse(Http2Connection, pieces, limits=_LIMITS))


def settled(outcome: Outcome, without: set[int]) -> tuple[object, ...]:
    """What of an outcome may not depend on time, leaving out the streams `without`.

    What the client may still send on a stream matters only while the stream is open.
    """
    streams = {stream_id: said for stream_id, said in outcome.streams.items() if stream_id not in without}
    is_over = without | {stream_id for stream_id, said in streams.items() if "end" in said}
    credit = {stream_id: size for stream_id, size in outcome.credit.items() if stream_id not in is_over}
    return streams, credit, outcome.control


def failed(outcome: Outcome) -> set[int]:
    """The streams that ended with an error. There may have been time for some messages before, and for other faults."""
    return {stream_id for stream_id, said in outcome.streams.items() if _failure(said)}


def _failure(said: list[object]) -> bool:
    """Whether a call failed, or its stream was reset."""
    return any(
        dict(item).get(b"grpc-status", b"0") != b"0" if isinstance(item, tuple) else isinstance(item, int) and item > 0
        for item in said
    )


def http2_bytes(data: bytes) -> None:
    """Any bytes after the preface, and after the first SETTINGS."""
    check_http2([PREFACE + data])
    check_http2([_START, data])


def http2_frames(data: bytes) -> None:
    """Frames that are right in themselves, with contents and in an order that need not be."""
    pieces = [piece for piece in pieces_of(data) if len(piece) >= 3]
    check_http2([_START, *[Frame(piece[0] % 11, piece[1], piece[2] % 16, piece[3:]).encode() for piece in pieces]])


def check_http2(pieces: list[bytes]) -> None:
    """The outcome is one that a server may have, and the same however the bytes are cut.

    Where streams end before the client has ended them, what it still sends on them is a matter of time, and with it
    whether that is a fault; and what was answered before a fault is a matter of time.
    """
    whole, cut = answer([b"".join(pieces)]), answer(pieces)
    if depends_on_time(b"".join(pieces)):
        return
    lost = failed(whole) | failed(cut)
    if not lost:
        assert [payload[4:8] for payload in whole.goaways] == [payload[4:8] for payload in cut.goaways]
    if not whole.goaways and not cut.goaways:
        assert settled(whole, lost) == settled(cut, lost)


def depends_on_time(said: bytes) -> bool:
    """Whether the client cancels streams, or changes its mind about what we may send."""
    at = len(PREFACE)
    while at + HEAD_BYTES <= len(said):
        kind, is_later = said[at + 3], at > len(PREFACE)
        if kind == FrameType.RST_STREAM or (kind == FrameType.SETTINGS and is_later):
            return True
        at += HEAD_BYTES + int.from_bytes(said[at : at + 3], "big")
    return False


TARGETS: dict[str, Callable[[bytes], None]] = {target.__name__: target for target in (http2_bytes, http2_frames)}

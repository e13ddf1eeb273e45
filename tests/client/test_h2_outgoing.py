"""Data that waits for windows. Whole uploads against a foreign server are in test_h2_connection.py."""

from __future__ import annotations

import hyperframe.frame

from modelserver.client.h2_outgoing import Outgoing, Uploads
from modelserver.wire.http2.settings import INITIAL_WINDOW_SIZE


def sent(outgoing: Outgoing) -> list[tuple[int, bytes, bool]]:
    """Stream, data and whether it ends the stream, of the DATA frames since the last time."""
    left = b"".join(outgoing.parts)
    outgoing.parts.clear()
    found = []
    while left:
        frame, size = hyperframe.frame.Frame.parse_frame_header(memoryview(left[:9]))
        frame.parse_body(memoryview(left[9 : 9 + size]))
        found.append((frame.stream_id, frame.data, "END_STREAM" in frame.flags))
        left = left[9 + size :]
    return found


def test_no_window_is_passed_and_the_last_frame_ends_the_stream() -> None:
    outgoing = Outgoing()
    uploads = Uploads(outgoing)
    uploads.apply([(INITIAL_WINDOW_SIZE, 10)])
    uploads.window, uploads.max_frame = 25, 4
    uploads.begin(1, b"0123456789ab", ends=True)
    assert sent(outgoing) == [(1, b"0123", False), (1, b"4567", False), (1, b"89", False)]
    uploads.begin(3, b"x" * 20, ends=False)
    assert [len(data) for _, data, _ in sent(outgoing)] == [4, 4, 2]
    # Five are left of the connection's window.
    uploads.widen(3, 10)
    assert [len(data) for _, data, _ in sent(outgoing)] == [4, 1]
    uploads.widen(1, 10)
    assert sent(outgoing) == []
    uploads.widen(0, 100)
    assert sorted(sent(outgoing)) == [(1, b"ab", True), (3, b"x", False), (3, b"xxxx", False)]


def test_a_window_may_become_negative() -> None:
    outgoing = Outgoing()
    uploads = Uploads(outgoing)
    uploads.begin(1, bytes(1000), ends=False)
    assert len(sent(outgoing)) == 1
    uploads.apply([(INITIAL_WINDOW_SIZE, 500)])
    uploads.add(1, b"more", ends=True)
    assert sent(outgoing) == []
    uploads.apply([(INITIAL_WINDOW_SIZE, 1003)])
    assert sent(outgoing) == [(1, b"mor", False)]
    uploads.widen(1, 1)
    assert sent(outgoing) == [(1, b"e", True)]
    uploads.widen(1, 1)


def test_streams_of_which_nothing_waits_are_ended() -> None:
    outgoing = Outgoing()
    uploads = Uploads(outgoing)
    uploads.begin(1, b"all", ends=False)
    uploads.begin(3, bytes(100_000), ends=False)
    uploads.begin(5, b"", ends=False)
    sent(outgoing)
    uploads.end_all()
    assert sent(outgoing) == [(1, b"", True), (5, b"", True)]
    uploads.drop(3)
    uploads.widen(0, 1 << 20)
    assert sent(outgoing) == []

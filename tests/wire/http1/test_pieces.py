from __future__ import annotations

import asyncio

import pytest
from support.http1_dialogue import Dialogue, later, limits_of

EVENTS = [("Content-Type", "text/event-stream; charset=utf-8")]
GET = b"GET /a HTTP/1.1\r\nHost: test\r\n\r\n"


async def test_pieces_are_chunks() -> None:
    dialogue = Dialogue(later).begin(GET)
    writer = dialogue.exchanges[0].start(200, EVENTS)
    await writer.write(b"data: 1\n\n")
    await writer.write(b"")
    await writer.write(memoryview(b"x" * 40_000))
    await writer.close()
    await writer.close()
    await asyncio.sleep(0)
    answer = dialogue.take()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    assert b"Content-Length" not in head
    assert body == b"9\r\ndata: 1\n\n\r\n9c40\r\n" + b"x" * 40_000 + b"\r\n0\r\n\r\n"
    dialogue.send(GET)
    assert len(dialogue.exchanges) == 2


async def test_a_client_that_knows_no_chunks_reads_to_the_close() -> None:
    dialogue = Dialogue(later).begin(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    writer = dialogue.exchanges[0].start(200, EVENTS)
    await writer.write(b"one")
    await writer.close()
    answer = dialogue.take()
    assert b"Connection: close" in answer
    assert answer.endswith(b"\r\n\r\none")
    assert dialogue.transport.ending == "write_eof"


async def test_head_asks_for_no_pieces() -> None:
    dialogue = Dialogue(later).begin(b"HEAD /a HTTP/1.1\r\nHost: test\r\n\r\n")
    writer = dialogue.exchanges[0].start(200, EVENTS)
    await writer.write(b"one")
    await writer.close()
    await asyncio.sleep(0)
    assert dialogue.take().endswith(b"\r\n\r\n")


async def test_a_writer_waits_for_its_reader() -> None:
    dialogue = Dialogue(later).begin(GET)
    writer = dialogue.exchanges[0].start(200, [])
    dialogue.connection.pause_writing()
    writing = asyncio.ensure_future(writer.write(b"one"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not writing.done()
    dialogue.connection.resume_writing()
    await asyncio.wait_for(writing, 60)


async def test_a_writer_learns_that_the_client_left() -> None:
    dialogue = Dialogue(later).begin(GET)
    left: list[str] = []
    dialogue.exchanges[0].on_disconnect = lambda: left.append("left")
    writer = dialogue.exchanges[0].start(200, [])
    dialogue.connection.pause_writing()
    writing = asyncio.ensure_future(writer.write(b"one"))
    await asyncio.sleep(0)
    dialogue.lose()
    with pytest.raises(ConnectionResetError):
        await writing
    with pytest.raises(ConnectionResetError):
        await writer.write(b"two")
    await writer.close()
    assert left == ["left"]


async def test_an_answer_may_begin_after_the_client_left() -> None:
    dialogue = Dialogue(later).begin(GET)
    dialogue.lose()
    writer = dialogue.exchanges[0].start(200, [])
    with pytest.raises(ConnectionResetError):
        await writer.write(b"one")
    await writer.close()


async def test_the_next_request_waits_for_the_last_piece() -> None:
    dialogue = Dialogue(later).begin(GET + GET)
    writer = dialogue.exchanges[0].start(200, [])
    assert len(dialogue.exchanges) == 1
    await writer.close()
    assert len(dialogue.exchanges) == 2


async def test_the_last_answer_before_the_end_of_a_drain() -> None:
    dialogue = Dialogue(later).begin(GET)
    writer = dialogue.exchanges[0].start(200, [])
    dialogue.connection.shutdown()
    await writer.write(b"one")
    await writer.close()
    assert dialogue.take().endswith(b"3\r\none\r\n0\r\n\r\n")
    assert dialogue.transport.ending == "close"


async def test_a_silent_event_stream_is_kept_open() -> None:
    dialogue = Dialogue(later, limits_of(times={"sse_comment_s": 15})).begin(GET)
    writer = dialogue.exchanges[0].start(200, EVENTS)
    await writer.write(b"data: 1\n\n")
    await asyncio.sleep(0)
    dialogue.take()
    dialogue.wait(15)
    await asyncio.sleep(0)
    assert dialogue.take() == b""
    dialogue.wait(10)
    await asyncio.sleep(0)
    assert dialogue.take() == b"8\r\n: ping\n\n\r\n"
    await writer.write(b"data: half")
    dialogue.wait(100)
    await asyncio.sleep(0)
    assert b"ping" not in dialogue.take()  # within an event it would end it
    await writer.write(b" and half\n\n")
    dialogue.wait(17)
    await asyncio.sleep(0)
    assert dialogue.take().count(b": ping\n\n") == 1


async def test_other_answers_in_pieces_may_be_silent() -> None:
    dialogue = Dialogue(later).begin(GET)
    dialogue.exchanges[0].start(200, [("Content-Type", "application/json")])
    await asyncio.sleep(0)
    dialogue.take()
    dialogue.wait(100)
    await asyncio.sleep(0)
    assert dialogue.take() == b""


async def test_a_callback_is_told_when_to_wait() -> None:
    dialogue = Dialogue(later).begin(GET)
    writer = dialogue.exchanges[0].start(200, EVENTS)
    assert writer.send(b"data: 1\n\n")
    dialogue.connection.pause_writing()
    assert not writer.send(b"data: 2\n\n")
    waiting = asyncio.ensure_future(writer.wait_for_room())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    dialogue.connection.resume_writing()
    await asyncio.wait_for(waiting, 60)
    assert writer.send(b"data: 3\n\n")
    await asyncio.sleep(0)
    _, _, body = dialogue.take().partition(b"\r\n\r\n")
    assert body == b"".join(b"9\r\ndata: %d\n\n\r\n" % number for number in (1, 2, 3))


async def test_a_callback_is_told_that_the_client_has_left() -> None:
    dialogue = Dialogue(later).begin(GET)
    writer = dialogue.exchanges[0].start(200, EVENTS)
    dialogue.connection.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        writer.send(b"data: 1\n\n")
    with pytest.raises(ConnectionResetError):
        await writer.wait_for_room()

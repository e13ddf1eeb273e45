"""Framing that two readers could read differently: refused or read in one way, however it arrives."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.http1_dialogue import Dialogue, DialogueHandler, path_back
from support.http1_smuggling import REFUSED, SERVED, SMUGGLED
from support.loops import on_both_loops

from modelserver.wire.address import Address
from modelserver.wire.native_server import NativeServer


async def _answer(pieces: list[bytes]) -> tuple[bytes, Dialogue]:
    dialogue = Dialogue().begin()
    for piece in pieces:
        if dialogue.transport.is_paused or dialogue.transport.is_closing():
            break
        dialogue.send(piece)
    await asyncio.sleep(0)
    return dialogue.take(), dialogue


def _check_refused(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"Connection: close" in head
    assert json.loads(body)["error"]


@pytest.mark.parametrize("name", REFUSED)
async def test_is_refused_and_ends_the_connection(name: str) -> None:
    sent, status = REFUSED[name]
    answer, dialogue = await _answer([sent + SMUGGLED])
    _check_refused(answer, status)
    assert dialogue.exchanges == []
    assert len(dialogue.violations) == 1
    assert dialogue.transport.ending == "write_eof"


@pytest.mark.parametrize("name", REFUSED)
async def test_is_refused_in_the_same_way_byte_by_byte(name: str) -> None:
    sent, _ = REFUSED[name]
    whole, _ = await _answer([sent + SMUGGLED])
    again, dialogue = await _answer([bytes((byte,)) for byte in sent + SMUGGLED])
    assert again == whole
    assert dialogue.exchanges == []


@pytest.mark.parametrize("name", REFUSED)
async def test_is_refused_behind_an_answered_request(name: str) -> None:
    before = b"GET /before HTTP/1.1\r\nHost: test\r\n\r\n"
    sent, status = REFUSED[name]
    answer, dialogue = await _answer([before + before + sent + SMUGGLED])
    assert answer.count(b"/before") == 2
    _check_refused(answer.rpartition(b"/before")[2], status)
    assert len(dialogue.exchanges) == 2


@pytest.mark.parametrize("name", SERVED)
async def test_is_read_in_one_way(name: str) -> None:
    sent, bodies = SERVED[name]
    for pieces in ([sent + SMUGGLED], [bytes((byte,)) for byte in sent + SMUGGLED]):
        _, dialogue = await _answer(pieces)
        assert [bytes(exchange.body) for exchange in dialogue.exchanges] == [*bodies, b""]
        assert [exchange.head.path for exchange in dialogue.exchanges] == ["/a", "/smuggled"]


@on_both_loops
async def test_over_a_socket() -> None:
    frontend = DialogueHandler(path_back)
    server = NativeServer(Address("127.0.0.1", 0), http=frontend)
    await server.start()
    for name, (sent, status) in REFUSED.items():
        if name == "no HTTP":
            continue  # the port takes it for TLS, and closes
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent + SMUGGLED)
        answer = await asyncio.wait_for(reader.read(), 60)
        _check_refused(answer, status)
        writer.close()
    assert frontend.exchanges == []
    await server.stop(5)

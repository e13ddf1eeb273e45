"""The road between two processes: order, size, back-pressure, and its end."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.fronts import until
from support.integrity import check_integrity
from support.loops import on_both_loops

from modelserver.execution.process.shared_buffer import SharedBuffer
from modelserver.wire.processes.link import INLINE_BYTES, Joined, Link
from modelserver.wire.processes.messages import CoreBundle, FrontBundle, HalfClose, Piece

DATAGRAM_BYTES = 96 << 10


class End:
    """One end of a link, with what it got."""

    def __init__(self, connection: socket.socket, outgoing: SharedBuffer, incoming: SharedBuffer, kind: Any) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.bundle_sizes: list[int] = []
        self.num_lost = 0
        self.keeps = False
        self.kept: list[Any] = []
        self.link: Link[Any] = Link(
            "peer", connection, outgoing, incoming, kind=kind, receive=self._receive, lost=self._lose
        )

    def _receive(self, messages: Sequence[Any]) -> None:
        self.bundle_sizes.append(len(messages))
        for message in messages:
            if isinstance(message, Piece):
                data = self.link.view(message.content)
                self.pieces.append((message.call, bytes(data)))
                if self.keeps:
                    self.kept.append(data)

    def _lose(self) -> None:
        self.num_lost += 1

    def send(self, number: int, data: bytes) -> None:
        self.link.send_with(number, Joined((data,)), lambda content: Piece(number, content))


@contextmanager
def ends() -> Iterator[tuple[End, End]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    up, down = SharedBuffer.create("up"), SharedBuffer.create("down")
    front = End(ours, up, SharedBuffer(os.dup(down.fd)), CoreBundle)
    core = End(theirs, down, SharedBuffer(os.dup(up.fd)), FrontBundle)
    try:
        yield front, core
    finally:
        front.link.close()
        core.link.close()


@on_both_loops
async def test_messages_of_one_turn_travel_together() -> None:
    with ends() as (front, core):
        for number in range(100):
            front.send(number, b"x")
        assert not front.link.is_empty
        await until(lambda: len(core.pieces) == 100)
        assert core.bundle_sizes == [100]
        assert front.link.is_empty


@on_both_loops
async def test_anything_arrives_in_order() -> None:
    sizes = [0, 1, 100, INLINE_BYTES, INLINE_BYTES + 1, DATAGRAM_BYTES, 1 << 20]
    chosen = random.Random(1)
    sent = [(number, os.urandom(chosen.choice(sizes))) for number in range(300)]
    with ends() as (front, core):
        for number, data in sent:
            front.send(number, data)
            if chosen.random() < 0.1:
                await asyncio.sleep(0)
        await until(lambda: len(core.pieces) == len(sent))
        assert core.pieces == sent


@on_both_loops
async def test_only_its_own_call_waits_for_large_content() -> None:
    large, larger = os.urandom(8 << 20), os.urandom(12 << 20)
    with ends() as (front, core):
        front.send(1, large)
        front.send(1, b"after it")
        front.send(1, larger)
        front.send(1, b"at the end")
        front.send(2, b"meanwhile")
        assert not front.link.is_empty
        await until(lambda: len(core.pieces) == 5)
        assert core.pieces == [(2, b"meanwhile"), (1, large), (1, b"after it"), (1, larger), (1, b"at the end")]
        assert front.link.is_empty
        front.send(1, large)
    await asyncio.sleep(0.05)  # the copy outlives the link


async def test_a_turn_that_does_not_fit_a_datagram_lies_in_memory() -> None:
    with ends() as (front, core):
        sent = [(number, bytes([number]) * INLINE_BYTES) for number in range(20)]
        for number, data in sent:
            front.send(number, data)
        await until(lambda: len(core.pieces) == 20)
        assert core.pieces == sent
        assert core.bundle_sizes == [20]
        core.link.tidy()
        await until(lambda: front.link._arena.num_leases == 0)


@on_both_loops
async def test_nothing_blocks_or_is_lost_when_the_peer_does_not_read() -> None:
    with ends() as (front, core):
        asyncio.get_running_loop().remove_reader(core.link._connection)
        num_sent = 0
        while front.link.is_empty or num_sent % 1000:
            for _ in range(20):
                front.send(num_sent, b"x" * 2000)
                num_sent += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        asyncio.get_running_loop().add_reader(core.link._connection, core.link._read)
        await until(lambda: len(core.pieces) == num_sent)
        assert [number for number, _ in core.pieces] == list(range(num_sent))
        assert front.link.is_empty


async def test_what_is_sent_while_reading_leaves_when_all_is_read() -> None:
    with ends() as (front, core):
        received = core._receive

        def answer(messages: Sequence[Any]) -> None:
            received(messages)
            for message in messages:
                core.link.send(Piece(message.call, b"answer"))

        core.link._receive = answer
        for number in range(50):
            front.send(number, b"x")
        await until(lambda: len(front.pieces) == 50)
        assert front.bundle_sizes == [50]


async def test_memory_that_is_in_use_is_not_used_again() -> None:
    with ends() as (front, core):
        core.keeps = True
        for number in range(10):
            front.send(number, bytes([number]) * (INLINE_BYTES + 1))
            await until(lambda number=number: len(core.pieces) == number + 1)
        assert [int(data[0]) for data in core.kept] == list(range(10))
        assert front.link._arena.num_leases == 10
        core.kept.clear()
        core.link.tidy()
        await until(lambda: front.link._arena.num_leases == 0)
        front.link.trim()
        check_integrity(front.link._arena)


async def test_the_peers_end_is_told_once() -> None:
    with ends() as (front, core):
        front.link.close()
        await until(lambda: core.num_lost == 1)
        core.send(1, b"x")
        core.send(2, b"x" * (INLINE_BYTES + 1))
        await asyncio.sleep(0.01)
        assert (core.num_lost, front.num_lost) == (1, 0)
        assert core.link.is_empty


async def test_a_peer_that_went_while_it_was_sent_to_is_lost() -> None:
    with ends() as (front, core):
        asyncio.get_running_loop().remove_reader(core.link._connection)
        core.link._connection.shutdown(socket.SHUT_RDWR)
        front.send(1, b"x")
        await until(lambda: front.num_lost == 1)


@pytest.mark.parametrize("datagram", [b"\xff\xff", b"\x92\x90\x91\x92\x63\x01", b"\x92\x90\x91\xc0"])
async def test_what_is_no_message_ends_the_link(datagram: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with ends() as (front, core):
        front.link._connection.send(datagram)
        await until(lambda: core.num_lost == 1)
    assert "an invalid message" in caplog.text


async def test_messages_for_the_other_side_are_no_messages() -> None:
    with ends() as (front, core):
        core.link.send(HalfClose(1))
        await until(lambda: front.num_lost == 1)

"""What a poller watches, and what it leaves behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.loops import on_both_loops
from support.socket_ends import Ends, Kept, calls_twin, polled, until

from modelserver.wire.sockets.poller import Poller

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_both_loops
async def test_it_leaves_no_descriptor_behind() -> None:
    await asyncio.to_thread(int)  # what the loop opens for threads
    gc.collect()
    num_before = _num_descriptors()
    for num_connections in (0, 1, 20):
        with polled() as poller:
            all_ends = [Ends(poller, Kept()) for _ in range(num_connections)]
            for ends in all_ends:
                ends.client.close()
                await ends.until("end", "lost")
        poller.close()
    gc.collect()
    assert _num_descriptors() == num_before


@on_both_loops
async def test_after_its_end_it_tells_nobody() -> None:
    with polled() as poller:
        all_ends = [Ends(poller, Kept()) for _ in range(8)]
    for ends in all_ends:
        ends.client.sendall(b"x")
    await asyncio.sleep(0.01)
    for ends in all_ends:
        assert ends.protocol.received == b""
        ends.transport.pause_reading()
        ends.transport.resume_reading()
        ends.transport.abort()
        ends.client.close()
        await ends.until("lost")


@on_both_loops
async def test_who_is_ended_by_another_in_the_same_turn_is_told_nothing() -> None:
    all_ends: list[Ends] = []

    def end_the_others(protocol: Kept, data: bytes | str) -> None:
        if isinstance(data, bytes):
            for ends in all_ends:
                if ends.protocol is not protocol:
                    ends.transport.abort()

    with polled() as poller:
        all_ends += [Ends(poller, Kept()) for _ in range(4)]  # which the loop watches itself
        in_set = [Ends(poller, Kept(act=end_the_others)) for _ in range(20)]
        all_ends += in_set
        for ends in in_set:
            ends.client.sendall(b"x")
        await until(lambda: any(ends.protocol.received for ends in in_set))
        await asyncio.sleep(0.01)
        (first,) = [ends for ends in all_ends if ends.protocol.received]
        for ends in all_ends:
            assert ends.protocol.told == (["made"] if ends is first else ["made", "lost"])
            ends.client.close()
        await first.until("end", "lost")


@on_both_loops
async def test_a_loop_that_once_had_no_room_has_it_again() -> None:
    loop = asyncio.get_running_loop()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with polled() as poller:
        all_ends = []
        for number in range(12):
            if number in (2, 4):  # as one that the loop watches itself, and as the first of the set
                poller._loop = cast(Any, SimpleNamespace(add_reader=refuse, remove_reader=int, remove_writer=int))
                lost = Ends(poller, Kept())
                await lost.until("lost")
                assert isinstance(lost.protocol.error, OSError)
                lost.client.close()
                poller._loop = loop
            all_ends.append(Ends(poller, Kept()))
            all_ends[-1].client.sendall(b"x")
        for ends in all_ends:
            await until(lambda ends=ends: ends.protocol.received == b"x")
            ends.client.close()
            await ends.until("end", "lost")


@on_both_loops
async def test_readers_and_writers_are_told_apart() -> None:
    class Told:
        def __init__(self) -> None:
            self.events: list[int] = []

        def ready(self, events: int) -> None:
            self.events.append(events)
            poller.watch(descriptor, 0, (self, None))

        def lose(self, error: Exception | None) -> None:
            raise AssertionError(error)

        def fail(self, error: Exception) -> None:
            raise AssertionError(error)

    read, write = 1, 4
    poller = Poller(asyncio.get_running_loop())
    pairs = [socket.socketpair() for _ in range(6)]
    for number, (ours, theirs) in enumerate(pairs):
        ours.setblocking(False)
        descriptor = ours.fileno()
        told = Told()
        poller.watch(descriptor, read, (told, None))
        await asyncio.sleep(0.005)
        assert told.events == []
        poller.watch(descriptor, write, (told, None))
        await until(lambda told=told: told.events == [write])
        theirs.sendall(b"x")
        await asyncio.sleep(0.005)
        assert told.events == [write]
        poller.watch(descriptor, read, (told, None))
        await until(lambda told=told: told.events[:2] == [write, read])
        assert set(told.events[2:]) <= {read}, "it may be told twice"
        if number < 5:  # it stays, so that the later ones are in the set
            poller.watch(descriptor, read, (Told(), None))
            ours.recv(1)
    poller.close()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()

"""Accepting: every connection is given away, also after the system had nothing left to accept with."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest
from support.loops import on_both_loops

from modelserver.wire import acceptor as acceptor_module
from modelserver.wire.acceptor import Acceptor
from modelserver.wire.address import Address

HOST = "127.0.0.1"


class Taker:
    """Keeps the sockets that it is given."""

    def __init__(self) -> None:
        self.taken: list[socket.socket] = []

    def take(self, accepted: socket.socket) -> None:
        self.taken.append(accepted)

    async def until(self, num_taken: int) -> None:
        async with asyncio.timeout(60):
            while len(self.taken) < num_taken:  # noqa: ASYNC110 - the kernel does it
                await asyncio.sleep(0.002)

    def close(self) -> None:
        for accepted in self.taken:
            accepted.close()


@on_both_loops
async def test_every_connection_is_taken() -> None:
    taker = Taker()
    bound = Address(HOST, 0).bind()
    acceptor = Acceptor(asyncio.get_running_loop(), bound, taker.take)
    acceptor.start()
    clients = [socket.create_connection(bound.getsockname()) for _ in range(200)]
    await taker.until(200)
    assert {accepted.getpeername() for accepted in taker.taken} == {client.getsockname() for client in clients}
    assert not any(accepted.getblocking() for accepted in taker.taken)
    assert {(accepted.family, accepted.type) for accepted in taker.taken} == {(bound.family, bound.type)}
    address = bound.getsockname()
    acceptor.close()
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for client in clients:
        client.close()
    taker.close()


class Exhausted:
    """A bound socket of a process that has no descriptor left, for the first attempt."""

    def __init__(self, bound: socket.socket) -> None:
        self._bound = bound
        self.is_exhausted = True

    def _accept(self) -> Any:
        if self.is_exhausted:
            self.is_exhausted = False
            raise OSError(errno.EMFILE, "Too many open files")
        return self._bound._accept()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)


@on_both_loops
async def test_accepting_goes_on_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor_module, "_EXHAUSTED_PAUSE_S", 0.02)
    taker = Taker()
    bound = Address(HOST, 0).bind()
    acceptor = Acceptor(asyncio.get_running_loop(), Exhausted(bound), taker.take)  # type: ignore[arg-type]
    acceptor.start()
    with socket.create_connection(bound.getsockname()):
        await taker.until(1)
    acceptor.close()
    taker.close()
    assert caplog.text.count("cannot accept connections, trying again in 0.02 s: Too many open files") == 1


@on_both_loops
async def test_closing_takes_what_has_connected() -> None:
    """Also within the pause."""
    bound = Address(HOST, 0).bind()
    exhausted, taker = Exhausted(bound), Taker()
    acceptor = Acceptor(asyncio.get_running_loop(), exhausted, taker.take)  # type: ignore[arg-type]
    acceptor.start()
    with socket.create_connection(bound.getsockname()):
        async with asyncio.timeout(60):
            while exhausted.is_exhausted:  # noqa: ASYNC110 - the kernel does it
                await asyncio.sleep(0.002)
    acceptor.close()
    assert len(taker.taken) == 1
    taker.close()

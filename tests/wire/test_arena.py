from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from modelserver.wire.context import ARENA_BYTES, Arena


class _Receiver(asyncio.BufferedProtocol):
    """Takes what arrives out of a shared arena at once, as every connection must."""

    def __init__(self, arena: Arena, expected: int) -> None:
        self.received = b""
        self.complete = asyncio.Event()
        self._arena = arena
        self._expected = expected

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._arena.view

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._arena.view[:nbytes]
        if len(self.received) == self._expected:
            self.complete.set()


async def _send_over_many() -> None:
    arena, receivers, loop = Arena(), list[_Receiver](), asyncio.get_running_loop()
    payloads = [bytes([number]) * (ARENA_BYTES + 1000 * number) for number in range(1, 6)]

    def accept() -> _Receiver:
        receivers.append(_Receiver(arena, len(payloads[len(receivers)])))
        return receivers[-1]

    server = await loop.create_server(accept, "127.0.0.1", 0)
    writers = []
    for _ in payloads:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        while len(receivers) <= len(writers):  # noqa: ASYNC110 - accepting is the loop's own business
            await asyncio.sleep(0)
        writers.append(writer)
    for writer, payload in zip(writers, payloads, strict=True):
        writer.write(payload)
    for receiver, payload, writer in zip(receivers, payloads, writers, strict=True):
        await asyncio.wait_for(receiver.complete.wait(), 60)
        assert receiver.received == payload
        writer.close()
        await writer.wait_closed()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connections_that_share_an_arena_do_not_see_each_others_bytes(run: Callable[..., None]) -> None:
    run(_send_over_many())


def test_both_views_are_of_the_same_memory() -> None:
    arena = Arena(100)
    arena.view[10:14] = b"\r\n\r\n"
    assert arena.memory.find(b"\r\n\r\n", 0, 14) == 10

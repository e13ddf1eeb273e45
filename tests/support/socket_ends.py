"""Both ends of a connection: a transport of ours with a protocol that keeps what it is told, and a client's socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modelserver.wire.sockets import calls
from modelserver.wire.sockets.poller import Poller
from modelserver.wire.sockets.transport import SocketTransport

MIB = 1 << 20
CALL_TWINS = ["python"] if calls.serve is calls.serve_in_python else ["python", "c"]


@pytest.fixture(params=CALL_TWINS)
def calls_twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test's system calls are this twin's."""
    if request.param == "python":
        for name in ("receive", "receive_soon", "transmit", "serve_one", "serve"):
            monkeypatch.setattr(calls, name, getattr(calls, f"{name}_in_python"))
    name: str = request.param
    return name


class Kept(asyncio.BufferedProtocol):
    """Keeps what it receives, in a buffer of `size`, and what it is told; `act` is called with each of the two."""

    def __init__(self, size: int = 65536, act: Callable[[Kept, bytes | str], None] | None = None) -> None:
        self._buffer = memoryview(bytearray(size))
        self._act = act
        self.received = b""
        self.told: list[str] = []
        self.error: Exception | None = None
        self.transport: asyncio.Transport
        self.stays_at_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._tell("made")

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer[:nbytes].tobytes()
        self.received += data
        if self._act is not None:
            self._act(self, data)

    def eof_received(self) -> bool:
        self._tell("end")
        return self.stays_at_end

    def pause_writing(self) -> None:
        self._tell("pause")

    def resume_writing(self) -> None:
        self._tell("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self._tell("lost")

    def _tell(self, news: str) -> None:
        self.told.append(news)
        if self._act is not None:
            self._act(self, news)


class Ends:
    """`client` blocks, for 10 s at most; the loop's own errors are in `failures`."""

    def __init__(self, poller: Poller, protocol: Kept, *, buffer_bytes: int | None = None, say: bytes = b"") -> None:
        """What the client is to `say` has come when the transport begins."""
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if buffer_bytes is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            self.client = socket.create_connection(listener.getsockname(), 10)
            self.accepted, _ = listener.accept()
        self.accepted.setblocking(False)
        self.failures: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, failure: self.failures.append(failure))
        self.client.sendall(say)
        self.protocol = protocol
        self.transport = self._begun(SocketTransport(loop, poller, self.accepted))

    def _begun(self, transport: SocketTransport) -> SocketTransport:
        transport.begin(self.protocol)
        return transport

    def reset(self) -> None:
        """The client closes as one whose process is killed with data unread."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.close()

    @property
    def is_lost(self) -> bool:
        """Whether the protocol was told."""
        return "lost" in self.protocol.told

    async def read(self, num_bytes: int) -> bytes:
        """So much of what was sent to the client."""
        parts = []
        while num_bytes:
            part = await asyncio.to_thread(self.client.recv, num_bytes)
            assert part, "the connection ended"
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    async def until(self, *news: str) -> None:
        """Until the protocol was told just this, after that it was made."""
        await until(
            lambda: self.protocol.told == ["made", *news], lambda: f"told {self.protocol.told}, {self.protocol.error!r}"
        )


@contextlib.contextmanager
def polled() -> Iterator[Poller]:
    """A poller of the running loop."""
    poller = Poller(asyncio.get_running_loop())
    try:
        yield poller
    finally:
        poller.close()


async def until(condition: Callable[[], bool], say: Callable[[], str] = str) -> None:
    try:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - what is waited for happens at the other end
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"waited in vain: {say()}") from None

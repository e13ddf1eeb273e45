"""A connection's socket as an asyncio transport of our own: reads when the poller says so, and writes at once."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from modelserver.core.tensor import Buffer
from modelserver.wire.sockets import calls
from modelserver.wire.sockets.calls import READ, WRITE, Watched, Watcher
from modelserver.wire.sockets.poller import Poller

# In one go, so that other connections do not wait for long.
_PATIENCE_NS: Final = 10_000
# Buffers in one call; the system takes 1,024.
_MAX_GATHERED: Final = 256
# As asyncio's transports.
_HIGH_BYTES: Final = 64 * 1024
ENDED: Final = "cannot write after write_eof()"
# The protocol of a transport that is lost.
NOBODY: Final = asyncio.BufferedProtocol()


class SocketTransport(asyncio.Transport, Watched):
    """Takes over a connected socket that does not block. Event loop thread only.

    For an `asyncio.BufferedProtocol`, which it calls as asyncio's transports do. A write passes as much as possible to
    the system at once; the rest waits, and must not be changed meanwhile.
    """

    __slots__ = (
        "_descriptor",
        "_events",
        "_has_ended",
        "_high",
        "_is_closing",
        "_is_ending",
        "_is_lost",
        "_is_paused",
        "_is_reading",
        "_loop",
        "_low",
        "_names",
        "_num_waiting",
        "_poller",
        "_protocol",
        "_socket",
        "_waiting",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, poller: Poller, connected: socket.socket) -> None:
        self._loop = loop
        self._poller = poller
        self._socket = connected
        self._descriptor = connected.fileno()
        self._protocol: asyncio.BufferedProtocol
        # The events that the poller watches for.
        self._events = 0
        self._is_reading = True
        # The peer sends no more; we send no more once what waits is sent; no more is taken; nothing is left to do.
        self._has_ended = self._is_ending = self._is_closing = self._is_lost = False
        # Written and not sent yet. None until data waits for the first time: most connections never need it.
        self._waiting: deque[memoryview] | None = None
        self._num_waiting = 0
        self._is_paused = False
        self._high, self._low = _HIGH_BYTES, _HIGH_BYTES // 4
        self._names: dict[str, Any] | None = None

    def begin(self, protocol: asyncio.BufferedProtocol) -> None:
        """Tell the protocol that the connection is there, and what has come already. Called once."""
        self._protocol = protocol
        try:
            protocol.connection_made(self)
        except Exception as error:
            self.fail(error)
        # Most clients speak first, and at once.
        self.ready(READ)
        self._watch()

    # Called by the poller, as are `lose` and `fail`.

    def ready(self, events: int) -> None:
        """The socket can be read (READ) or written (WRITE), or has failed (any other bit)."""
        try:
            if events & ~READ and self._num_waiting:
                self._go_on()
            if events & ~WRITE and self._is_reading:
                self._receive()  # once: then it is the other connections' turn
        except Exception as error:
            self.fail(error)

    # Reading.

    def pause_reading(self) -> None:
        self._set_reading(False)

    def resume_reading(self) -> None:
        self._set_reading(not (self._is_closing or self._has_ended))

    def is_reading(self) -> bool:
        return self._is_reading

    def _set_reading(self, is_reading: bool) -> None:
        if is_reading != self._is_reading:
            self._is_reading = is_reading
            self._watch()

    def receive_soon(self) -> None:
        """Read the data that arrives within the next moment. Called when the loop is idle and data is likely."""
        try:
            if self._is_reading:
                self._receive(_PATIENCE_NS)
        except Exception as error:
            self.fail(error)

    def _receive(self, patience_ns: int = 0) -> None:
        """Give the protocol the received data."""
        buffer: memoryview = self._protocol.get_buffer(-1)  # type: ignore[assignment]  # typeshed: any buffer
        try:
            if patience_ns:
                num_bytes = calls.receive_soon(self._descriptor, buffer, patience_ns)
            else:
                num_bytes = calls.receive(self._descriptor, buffer)
        except OSError as error:
            self.lose(error)
            return
        if not buffer:
            raise RuntimeError("get_buffer() returned an empty buffer")
        if num_bytes > 0:
            self._protocol.buffer_updated(num_bytes)
        elif num_bytes == 0:
            self._end()

    def _end(self) -> None:
        """The peer sends no more."""
        self._has_ended = True
        self._set_reading(False)
        if not self._protocol.eof_received():
            self.close()

    # Writing.

    def write(self, data: Buffer) -> None:
        if self._is_closing:
            return
        if self._is_ending:
            raise RuntimeError(ENDED)
        if not self._num_waiting:
            try:
                num_sent = calls.transmit(self._descriptor, data)
            except OSError as error:
                self.lose(error)
                return
            if num_sent == len(data):
                return
            data = memoryview(data)[num_sent:]
        self._wait(data)
        self._watch()
        self._mind_limit()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """As `write` of all of them in one call of the system. Unlike asyncio's, it neither copies nor forgets the
        back-pressure."""
        if self._is_closing:
            return
        if self._is_ending:
            raise RuntimeError(ENDED)
        is_first = not self._num_waiting
        for data in list_of_data:
            self._wait(data)
        if is_first and self._num_waiting:
            self._send_waiting()
        self._watch()
        self._mind_limit()

    def write_eof(self) -> None:
        """Send no more than what was written. Safe to repeat."""
        if not (self._is_ending or self._is_closing):
            self._is_ending = True
            if not self._num_waiting:
                self._shut()

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Raises ValueError for limits that are the wrong way round."""
        if high is None:
            high = _HIGH_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not 0 <= low <= high:
            raise ValueError(f"expected 0 <= low <= high, got low {low} and high {high}")
        self._high, self._low = high, low
        self._mind_limit()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._num_waiting

    def _wait(self, data: Buffer) -> None:
        if data:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(memoryview(data))
            self._num_waiting += len(data)

    def _mind_limit(self) -> None:
        if self._num_waiting > self._high and not self._is_paused:
            self._is_paused = True
            try:
                self._protocol.pause_writing()
            except Exception as error:
                self.fail(error)

    def _go_on(self) -> None:
        """The system takes more."""
        self._send_waiting()
        if self._is_lost:
            return
        if self._is_paused and self._num_waiting <= self._low:
            self._is_paused = False
            self._protocol.resume_writing()
        if not self._num_waiting:
            if self._is_closing:
                self.lose(None)
            elif self._is_ending:
                self._shut()
        self._watch()

    def _send_waiting(self) -> None:
        """As much as the system takes."""
        waiting = self._waiting
        assert waiting, "something waits"
        while waiting:
            try:
                num_sent = self._socket.sendmsg(islice(waiting, _MAX_GATHERED))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.lose(error)
                return
            self._num_waiting -= num_sent
            num_whole = min(len(waiting), _MAX_GATHERED)
            while num_whole and num_sent >= len(waiting[0]):
                num_sent -= len(waiting.popleft())
                num_whole -= 1
            if num_whole:
                waiting[0] = waiting[0][num_sent:]
                return

    def _shut(self) -> None:
        with suppress(OSError):  # the peer has closed, which reading finds
            self._socket.shutdown(socket.SHUT_WR)

    # The end.

    def close(self) -> None:
        """Read no more, and be lost once what was written is sent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._set_reading(False)
        if not self._num_waiting:
            self.lose(None)

    def abort(self) -> None:
        self.lose(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def fail(self, error: Exception) -> None:
        """The protocol has raised: end, and have it be known."""
        self._loop.call_exception_handler(
            {"message": "a protocol failed", "exception": error, "transport": self, "protocol": self._protocol}
        )
        self.lose(error)

    def lose(self, error: Exception | None) -> None:
        """End, and drop unsent data. The protocol is notified in the loop's next turn, so that it is not called while
        it runs. Safe to repeat."""
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._is_reading = False
        self._waiting = None
        self._num_waiting = 0
        self._watch()
        self._loop.call_soon(self._tell_lost, error)

    def _tell_lost(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            # Each would keep the other until the collector comes.
            self._protocol = NOBODY
            self._socket.close()

    def _watch(self) -> None:
        """Have the poller watch for the awaited events."""
        events = (READ if self._is_reading else 0) | (WRITE if self._num_waiting else 0)
        if events != self._events:
            self._events = events
            try:
                self._poller.watch(self._descriptor, events, self._watcher())
            except OSError as error:  # no memory, or too many watched
                self._poller.forget(self._descriptor)
                self._events = 0
                self.lose(error)

    def _watcher(self) -> Watcher:
        return self, self._protocol if self._is_reading else None

    # Who is who.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Raises TypeError unless it is an `asyncio.BufferedProtocol`."""
        self._protocol = buffered(protocol)
        events, self._events = self._events, 0
        if events:
            self._watch()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`socket`, `peername` or `sockname`."""
        if name == "socket":
            return self._socket
        if name not in ("peername", "sockname"):
            return default
        if self._names is None:
            self._names = {}
        if name not in self._names:
            self._names[name] = self._asked(name)
        found = self._names[name]
        return default if found is None else found

    def _asked(self, name: str) -> Any:
        try:
            return self._socket.getpeername() if name == "peername" else self._socket.getsockname()
        except OSError:  # reset
            return None


def buffered(protocol: asyncio.BaseProtocol) -> asyncio.BufferedProtocol:
    """The protocol. Raises TypeError unless it is of the kind that our transports serve."""
    if not isinstance(protocol, asyncio.BufferedProtocol):
        raise TypeError(f"expected an asyncio.BufferedProtocol, got {type(protocol).__name__}")
    return protocol


def receive_soon_of(transport: asyncio.BaseTransport) -> Callable[[], None] | None:
    """Its `receive_soon`, if it has one."""
    return getattr(transport, "receive_soon", None)


def gathers(transport: asyncio.BaseTransport) -> bool:
    """Whether its `writelines` copies nothing. With TLS each piece would become a record, and so they are joined."""
    return isinstance(transport, SocketTransport)

"""One end of the connection between the server and a child process.

A message is one datagram on a Unix socket pair: a prefix, the payload (tensors), the record. A payload or record
that is large lies in the sender's arena instead, and the prefix says where. The receiver's arrays are views of it;
when the last one dies, the lease goes back to the sender with the next message.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from modelserver.core.long_work import Slices
from modelserver.execution.process.messages import AnyMessage, Message, Trim
from modelserver.execution.process.packing import Payload
from modelserver.execution.process.shared_buffer import Arena, ByteView, Leases, SharedBuffer

# If a yield takes longer than this, another process has used the core.
_CROWDED_NS = 25_000
_MAX_PAUSE = 256


class BusyWait:
    """Polls for a message before sleeping, where the other process is likely to send one soon.

    A wake-up takes longer than a small model: two processes that answer each other within microseconds would lose most
    of their time by sleeping in between. So a waiter polls for a moment before it sleeps, and yields between two looks.
    After polling that found nothing, or when others need the core, it skips ever more waits: on a busy machine, and
    between requests that are far apart, nearly all waits just sleep.

    Used by one thread at a time, for one wait after the other. A wait is `begin`; if that is true, looks, with `go_on`
    after each that found nothing; and `end`.
    """

    __slots__ = ("_budget_ns", "_deadline_ns", "_let_go", "_next_pause", "_now_ns", "_pause", "_seen_ns")

    def __init__(
        self,
        budget_us: int,
        *,
        num_cores: int | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        let_go: Callable[[], None] = os.sched_yield,
    ) -> None:
        """`budget_us` is how long to poll at most; 0 never polls, and neither does a machine with one core."""
        num_cores = num_cores or len(os.sched_getaffinity(0))
        self._budget_ns = budget_us * 1000 if num_cores > 1 else 0
        self._now_ns = now_ns
        self._let_go = let_go
        self._deadline_ns = 0
        self._seen_ns = 0
        self._pause = 0  # waits that sleep at once
        self._next_pause = 1

    def begin(self) -> bool:
        """Whether to poll before sleeping."""
        if not self._budget_ns:
            return False
        if self._pause:
            self._pause -= 1
            return False
        self._seen_ns = self._now_ns()
        self._deadline_ns = self._seen_ns + self._budget_ns
        return True

    def go_on(self) -> bool:
        """Yield the core; whether to look once more."""
        self._let_go()
        now_ns = self._now_ns()
        is_crowded = now_ns - self._seen_ns > _CROWDED_NS
        self._seen_ns = now_ns
        return not is_crowded and now_ns < self._deadline_ns

    def end(self, *, has_come: bool) -> None:
        """The message has come, or the wait continues asleep."""
        if has_come:
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(_MAX_PAUSE, 2 * self._next_pause)


# Up to this size, two copies by the kernel cost less than a lease.
_INLINE_BYTES: Final = 24 << 10
_DATAGRAM_BYTES: Final = 64 << 10
# Payload and record: where each begins in the arena (_INLINE: in this datagram), and its length.
_PREFIX: Final = struct.Struct("<QQQQ")
_INLINE: Final = (1 << 64) - 1

# A number that one side leaves for the other at the start of its arena, readable after its end.
_MARK: Final = struct.Struct("<Q")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode

Received = tuple[AnyMessage, bytearray | ByteView]


class PeerGoneError(Exception):
    """The other process closed its end. `was_unread`: it never read the last message."""

    def __init__(self, *, was_unread: bool) -> None:
        super().__init__("the other process closed the connection")
        self.was_unread = was_unread

    def __reduce__(self) -> tuple[Callable[[bool], PeerGoneError], tuple[bool]]:
        """Makes it picklable: a pool that cannot unpickle an exception of its worker waits for ever."""
        return _peer_gone, (self.was_unread,)


def _peer_gone(was_unread: bool) -> PeerGoneError:
    return PeerGoneError(was_unread=was_unread)


class Channel:
    """Sends messages with tensors, receives them.

    Any thread may send, and one at a time receive; arrays may die on any thread.
    """

    def __init__(self, connection: socket.socket, outgoing: SharedBuffer, incoming: SharedBuffer) -> None:
        self._connection = connection
        self._leases = Leases(incoming)
        self.arena = Arena(outgoing)
        self._is_closed = False
        self._buffer = memoryview(bytearray(_DATAGRAM_BYTES))
        # Guards the arena, and lets one message out at a time.
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._mark: memoryview = memoryview(bytearray(_MARK.size))

    def keep_mark(self) -> None:
        """Reserve the place of `set_mark`: the first lease of the arena, which is never freed."""
        offset = self.arena.allocate(_MARK.size)
        assert offset == 0, "the mark is where the peer looks for it"
        self._mark = self.arena.buffer.view(offset, _MARK.size).data

    def set_mark(self, number: int) -> None:
        """Leave a number that the peer can read even if this process dies at once."""
        _MARK.pack_into(self._mark, 0, number)

    def read_mark(self) -> int:
        """The last number of the peer's `set_mark`; 0 before the first."""
        return self._leases.peek(_MARK)

    @property
    def num_unreturned(self) -> int:
        """Leases that this side is done with and has not returned to the peer."""
        return self._leases.num_returned

    @property
    def has_leases(self) -> bool:
        """Whether one side still uses memory of the other."""
        return self.arena.num_leases > 0 or self._leases.num_alive > 0

    @property
    def has_unsent(self) -> bool:
        """Whether `try_send` kept messages for which the peer's queue has no room yet."""
        return bool(self._unsent)

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send one message and empty `payload`; blocks while the peer's queue is full. Raises PeerGoneError."""
        with self._lock:
            datagram = self._encode(message, payload)
            try:
                self._connection.send(datagram)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGoneError(was_unread=True) from error

    def send_if_free(self, message: Message) -> bool:
        """As `send`, unless a thread, perhaps this one, is sending now: then False."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._connection.send(self._encode(message, None))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGoneError(was_unread=True) from error
        finally:
            self._lock.release()
        return True

    def try_send(self, message: Message, payload: Payload | None = None) -> None:
        """As `send`, without blocking: a message that finds no room is kept for `send_unsent`."""
        with self._lock:
            datagram = self._encode(message, payload)
            if not self._unsent:
                try:
                    self._connection.send(datagram, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGoneError(was_unread=True) from error
                else:
                    return
            self._unsent.append(datagram)

    def send_unsent(self) -> None:
        """Send kept messages as far as there is room. Raises PeerGoneError."""
        unsent = self._unsent
        with self._lock:
            while unsent:
                try:
                    self._connection.send(unsent[0], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGoneError(was_unread=True) from error
                unsent.popleft()

    def placing(self, payload: Payload) -> Slices[None]:
        """Copy tensors to the arena in slices, before they are sent. Any thread may do it.

        The place is released if the work is given up. Raises PeerGoneError, and OSError if there is not enough memory.
        """
        with self._lock:
            if self._is_closed:
                raise PeerGoneError(was_unread=True)
            place = self.arena.allocate(payload.nbytes)
            target = self.arena.buffer.view(place, payload.nbytes)
        try:
            yield from payload.writing(target)
        except BaseException:
            with self._lock:
                self.arena.free(place)
            raise
        payload.clear()
        payload.place = place

    def discard_unsent(self) -> None:
        """Drop the messages that `try_send` kept."""
        self._unsent.clear()

    def receive(self) -> Received:
        """The next message and its payload, from which `packing.unpack` makes tensors.

        Blocks until there is one. Raises PeerGoneError.
        """
        return self._receive(0)

    def try_receive(self) -> Received | None:
        """As `receive`; None when there is no message."""
        try:
            return self._receive(socket.MSG_DONTWAIT)
        except TimeoutError:
            return None

    def _encode(self, message: Message, payload: Payload | None) -> bytes:
        """The datagram of a message. Called with the lock held."""
        if self._is_closed:
            raise PeerGoneError(was_unread=True)
        payload_at, payload_bytes = _INLINE, 0
        chunks = [b""]  # the prefix, whose content is known last
        if payload is not None and payload.nbytes:
            payload_bytes = payload.nbytes
            if payload.place is not None:
                payload_at = payload.place
            elif payload_bytes <= _INLINE_BYTES:
                payload.append_to(chunks)
            else:
                payload_at = self.arena.allocate(payload_bytes)
                payload.write(self.arena.buffer.view(payload_at, payload_bytes))
            # It may have held views of the peer's arena, whose leases go back with this very message.
            payload.clear()
        if self._leases.has_returned:
            message.released = self._leases.take_returned()
        record_at, record = _INLINE, _encode(message)
        record_bytes = len(record)
        if record_bytes > _INLINE_BYTES:
            record_at = self.arena.allocate(record_bytes)
            self.arena.buffer.view(record_at, record_bytes)[:] = np.frombuffer(record, np.uint8)
        else:
            chunks.append(record)
        chunks[0] = _PREFIX.pack(payload_at, payload_bytes, record_at, record_bytes)
        return b"".join(chunks)

    def _receive(self, flags: int) -> Received:
        buffer = self._buffer
        try:
            count = self._connection.recv_into(buffer, 0, flags)
        except ConnectionResetError as error:
            # The kernel says "reset" when the peer went with datagrams in its queue.
            raise PeerGoneError(was_unread=True) from error
        except BlockingIOError as error:
            raise TimeoutError("there is no message") from error
        except OSError as error:
            raise PeerGoneError(was_unread=False) from error
        if count == 0:
            raise PeerGoneError(was_unread=False)
        payload_at, payload_bytes, record_at, record_bytes = _PREFIX.unpack_from(buffer)
        position = _PREFIX.size
        payload: bytearray | ByteView
        if payload_at == _INLINE:
            payload = bytearray(buffer[position : position + payload_bytes])
            position += payload_bytes
        else:
            payload = self._leases.view(payload_at, payload_bytes)
        if record_at == _INLINE:
            message: AnyMessage = _decode(buffer[position:count])
        else:
            message = _decode(self._leases.view(record_at, record_bytes).data)
        if message.released:
            with self._lock:
                for offset in message.released:
                    self.arena.free(offset)
        return message, payload

    def wait(self, timeout_s: float) -> bool:
        """Whether a message, or the peer's end, is there within `timeout_s`."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def trim(self) -> None:
        """Let the peer give back memory that is not needed without traffic. Raises PeerGoneError."""
        self.try_send(Trim())

    def trim_arena(self) -> bool:
        """As `Arena.trim`."""
        with self._lock:
            return self.arena.trim()

    def shutdown(self) -> None:
        """End the connection: a blocked `receive`, here or there, raises PeerGoneError. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._connection.fileno()

    def disown(self) -> None:
        """In a forked copy of this process: leave the connection to the original. Using it raises PeerGoneError."""
        self._lock = threading.Lock()  # a thread that was not copied may have held it
        self._is_closed = True
        self._connection.close()

    def close(self) -> None:
        """Close descriptors; arrays that were received stay valid."""
        with self._lock:  # `placing` may allocate in another thread
            self._is_closed = True
            self._connection.close()
            self.arena.buffer.close()
            self._leases.close()

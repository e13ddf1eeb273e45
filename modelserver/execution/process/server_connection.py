"""The child's end of the connection to the server: any thread may send, and any thread may wait for its messages.

No thread only receives. One of the waiting threads receives for all of them, so a model that makes no calls while it
executes costs no thread a wake-up.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from modelserver.backend import InferResponse, ServerError
from modelserver.execution.process.channel import BusyWait, Channel, PeerGoneError, Received
from modelserver.execution.process.messages import (
    Cancelled,
    Execute,
    Message,
    Released,
    Reply,
    Room,
    SentTogether,
    Told,
)
from modelserver.execution.process.packing import Payload, RowRecords, response_record
from modelserver.execution.process.shared_buffer import ByteView

Found = TypeVar("Found")

# With more leases than this at the server, a sender first checks whether some were returned.
_MANY_LEASES = 16


class Waiting(abc.ABC):
    """Takes the replies to one `Call` or `Ask`. Called under the connection's lock, so it must be quick."""

    @abc.abstractmethod
    def take(self, message: Reply | Told, payload: bytearray | ByteView) -> None:
        """A reply has arrived."""


class ResponseBatch:
    """Responses to send together; filled and sent by one thread."""

    def __init__(self) -> None:
        self.payload = Payload()
        self.message = SentTogether()
        self.ended: list[int] = []
        self._rows = RowRecords(self.message.rows)

    def add(self, number: int, response: InferResponse | ServerError | None, *, is_final: bool) -> None:
        if not is_final and self._rows.take(number, response):
            return
        record = None if response is None else response_record(response, self.payload)
        self.message.sent.append((number, record, is_final))
        if is_final:
            self.ended.append(number)

    @property
    def is_empty(self) -> bool:
        return not (self.message.sent or self.message.rows)


class ServerConnection:
    """Sends to the server, and receives from it.

    `_lock` guards the tables and the role of the receiver. `_changed` is a condition on it, notified when messages may
    have arrived; code that does not wait takes the plain lock, which costs less.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arena = channel.arena
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inbox: deque[Received] = deque()
        self._open: set[int] = set()  # requests that their model answers after `execute`
        self._cancelled: set[int] = set()
        self._full: set[int] = set()
        self._watchers: dict[int, tuple[Callable[[], None] | None, Callable[[], None] | None]] = {}
        self._waiting: dict[int, Waiting] = {}
        self._num_waiters = 0
        self._is_receiving = False
        self._last_number = 0
        self._num_pending = 0  # replies that event loops wait for
        self._pump: threading.Thread | None = None
        self._abandoned: deque[tuple[int, bool]] = deque()
        self._posted: deque[Message] = deque()
        self._gone: PeerGoneError | None = None
        self._busy_wait = BusyWait(0)  # the receiver's
        # Whether this is a forked copy of the process, in which the server cannot be asked.
        self.is_disowned = False
        # Collects sent responses between `hold` and `release`.
        self.response_batch: ResponseBatch | None = None

    def stay_awake(self, budget_us: int) -> None:
        """Let the receiver poll for `budget_us` before it sleeps. Called before there are other threads."""
        self._busy_wait = BusyWait(budget_us)

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send; waits while the server does not read. Raises PeerGoneError."""
        if self._arena.num_leases > _MANY_LEASES:
            self.poll()
        self._channel.send(message, payload)
        if self._posted:
            self._send_posted()

    def disown(self) -> None:
        """In a forked copy of this process, which has only the forking thread: leave the server to the original."""
        self.is_disowned = True
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._gone = PeerGoneError(was_unread=False)
        self._channel.disown()

    def hold(self) -> None:
        """Keep sent responses until `release`. For a child in which one thread sends them."""
        self.response_batch = ResponseBatch()

    def release(self) -> list[int]:
        """Send the responses kept since `hold` in one message; the numbers of the requests that they end."""
        response_batch, self.response_batch = self.response_batch, None
        if response_batch is None or response_batch.is_empty:
            return []
        self.send(response_batch.message, response_batch.payload)
        return response_batch.ended

    def post(self, message: Message) -> None:
        """Send without taking a lock that the thread may hold: for destructors, which may run anywhere."""
        self._posted.append(message)
        self._send_posted()

    def next_message(self) -> Received:
        """The next message for the main thread, which alone may call this. Raises PeerGoneError."""
        # As `wait`, if no other thread receives.
        while True:
            with self._lock:
                if self._inbox:
                    return self._inbox.popleft()
                if self._is_receiving or self._gone is not None:
                    break
                self._is_receiving = True
            self._receive(self._next_received)
        return self.wait(self._take_message)

    def wait(self, take: Callable[[], Found | None]) -> Found:
        """Wait until `take` returns something other than None. It is called under the lock, and must be quick.

        Raises PeerGoneError when the server is gone.
        """
        changed = self._changed
        while True:
            with changed:
                while True:
                    if (found := take()) is not None:
                        return found
                    if self._gone is not None:
                        raise self._gone
                    if not self._is_receiving:
                        self._is_receiving = True
                        break
                    self._num_waiters += 1
                    changed.wait()
                    self._num_waiters -= 1
            self._receive(self._next_received)

    def poll(self) -> None:
        """Receive pending messages without waiting, unless another thread is receiving."""
        while True:
            with self._changed:
                if self._is_receiving:
                    return
                self._is_receiving = True
            if not self._receive(self._channel.try_receive):
                return

    def is_cancelled(self, number: int) -> bool:
        """Whether the caller of the request has left, by the messages so far."""
        self.poll()
        return number in self._cancelled

    def has_room(self, number: int) -> bool:
        """Whether a response of the request may be sent now."""
        self.poll()
        return number not in self._full

    def wait_for_room(self, number: int) -> None:
        """Wait until `has_room`, or until the caller has left."""
        if not self.has_room(number):
            self.wait(lambda: number not in self._full or number in self._cancelled or None)

    def watch(self, number: int, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        """Set callbacks, called under the lock: when the caller leaves, and each time there is room again."""
        with self._changed:
            old_cancel, old_room = self._watchers.get(number, (None, None))
            self._watchers[number] = (on_cancel or old_cancel, on_room or old_room)
            is_cancelled = number in self._cancelled
        if is_cancelled and on_cancel is not None:
            on_cancel()

    def close_request(self, number: int) -> None:
        """Forget the request, which has ended."""
        with self._changed:
            self._open.discard(number)
            self._forget_request(number)

    def keep_request(self, number: int) -> None:
        """Keep the request beyond its batch."""
        with self._changed:
            self._open.add(number)

    def close_requests(self, numbers: range) -> None:
        """Forget the requests of executed batches, except kept ones."""
        if not (self._cancelled or self._full or self._watchers):
            return
        with self._changed:
            known = {*self._cancelled, *self._full, *self._watchers}
            for number in known:
                if number < numbers.stop and number not in self._open:
                    self._forget_request(number)

    def expect(self, waiting: Waiting, *, is_async: bool = False) -> int:
        """A number for a `Call` or an `Ask`, whose replies go to `waiting` until `forget`.

        `is_async`: no thread will `wait` for them, so the connection's own thread receives.
        """
        with self._changed:
            self._last_number += 1
            number = self._last_number
            self._waiting[number] = waiting
            if is_async:
                self._num_pending += 1
                if self._pump is None:
                    self._pump = threading.Thread(target=self._receive_for_loops, name="replies", daemon=True)
                    self._pump.start()
                self._changed.notify_all()
        return number

    def wake(self) -> None:
        """Let those that `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def forget(self, number: int, *, is_async: bool = False) -> None:
        """Expect no more replies under the number. Safe to repeat."""
        with self._changed:
            if self._waiting.pop(number, None) is not None and is_async:
                self._num_pending -= 1
                self._changed.notify_all()

    def abandon(self, number: int, *, is_async: bool) -> None:
        """As `forget`, from a destructor: done when the next message is dispatched."""
        self._abandoned.append((number, is_async))

    def _send_posted(self) -> None:
        with contextlib.suppress(IndexError, PeerGoneError):
            while self._posted and self._channel.send_if_free(self._posted[0]):
                self._posted.popleft()

    def _take_message(self) -> Received | None:
        return self._inbox.popleft() if self._inbox else None

    def _next_received(self) -> Received:
        busy_wait = self._busy_wait
        if busy_wait.begin():
            while True:
                received = self._channel.try_receive()
                if received is not None:
                    busy_wait.end(has_come=True)
                    return received
                if not busy_wait.go_on():
                    break
            busy_wait.end(has_come=False)
        return self._channel.receive()

    def _receive(self, receive: Callable[[], Received | None]) -> bool:
        """Receive one message and dispatch it; False if there was none. The caller is the receiver."""
        received: Received | None = None
        gone: PeerGoneError | None = None
        try:
            received = receive()
        except PeerGoneError as error:
            gone = error
        with self._lock:
            self._is_receiving = False
            if gone is not None:
                self._gone = gone
            if received is not None:
                self._dispatch(received)
            if self._num_waiters:
                self._changed.notify_all()
        return received is not None

    def _dispatch(self, received: Received) -> None:
        if self._abandoned:
            self._forget_abandoned()
        message, payload = received
        if type(message) is Execute:
            self._inbox.append(received)
        elif isinstance(message, Reply | Told):
            waiting = self._waiting.get(message.number)
            if waiting is not None:
                waiting.take(message, payload)
        elif isinstance(message, Cancelled):
            self._cancelled.add(message.number)
            on_cancel, on_room = self._watchers.pop(message.number, (None, None))
            for callback in (on_cancel, on_room):
                if callback is not None:
                    callback()
        elif isinstance(message, Room):
            if not message.has_room:
                self._full.add(message.number)
                return
            self._full.discard(message.number)
            on_room = self._watchers.get(message.number, (None, None))[1]
            if on_room is not None:
                on_room()
        elif not isinstance(message, Released):
            self._inbox.append(received)

    def _forget_abandoned(self) -> None:
        while self._abandoned:
            number, is_async = self._abandoned.popleft()
            if self._waiting.pop(number, None) is not None:
                self._num_pending -= is_async

    def _forget_request(self, number: int) -> None:
        self._cancelled.discard(number)
        self._full.discard(number)
        self._watchers.pop(number, None)

    def _receive_for_loops(self) -> None:
        """The thread that receives while only event loops wait for replies."""
        with contextlib.suppress(PeerGoneError):
            while self._gone is None:
                with self._changed:
                    self._num_waiters += 1
                    self._changed.wait_for(lambda: self._num_pending > 0 or self._gone is not None)
                    self._num_waiters -= 1
                self.wait(lambda: None if self._num_pending > 0 else True)

"""The server's end of the connection to one child process, on an event loop.

Everything here runs on that loop's thread. Whatever the child says, and its end, is handled as it comes; nothing
waits for anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from modelserver.backend import InferResponse, ResponseSender, ServerError
from modelserver.core.request import InFlightRequest
from modelserver.execution.process.channel import PeerGoneError
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.in_flight_batch import InFlightBatch
from modelserver.execution.process.messages import (
    AnyMessage,
    Ask,
    AskReady,
    Began,
    Call,
    CallRead,
    CancelCall,
    Cancelled,
    Execute,
    Executed,
    Measured,
    Message,
    Readiness,
    Released,
    Room,
    Sent,
    SentTogether,
)
from modelserver.execution.process.packing import Payload, response_of
from modelserver.execution.process.shared_buffer import ByteView

# How long the readiness endpoint may hold the event loop for an idle child's answer.
_READINESS_WAIT_S = 0.05
# An answer to the readiness question that takes longer means "no".
_READINESS_LIMIT_S = 5.0


class Asked(Protocol):
    """What a probe needs of the connection to a child."""

    def ask_ready(self, number: int) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """Handle what the child says within that time; whether there was something."""


class ReadinessProbe:
    """The last answer of a child to "are you ready?" and the question that is still open."""

    def __init__(self, *, is_asked: bool = False) -> None:
        self.is_asked = is_asked
        self._number = 0
        self._asked_at_s: float | None = None
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        if self.waited_s > _READINESS_LIMIT_S:
            return False
        return self._is_ready

    @property
    def waited_s(self) -> float:
        """For how long the question has been open; 0 when it is answered."""
        return 0.0 if self._asked_at_s is None else time.monotonic() - self._asked_at_s

    def ask(self, connection: Asked) -> None:
        """Put the question, unless it is open, and wait a moment for the answer. Called from the loop thread."""
        if self._asked_at_s is None:
            self._number += 1
            self._asked_at_s = time.monotonic()
            connection.ask_ready(self._number)
        until_s = time.monotonic() + _READINESS_WAIT_S
        while self._asked_at_s is not None and (left_s := until_s - time.monotonic()) > 0:
            if not connection.wait(left_s):
                return

    def record(self, message: Readiness) -> None:
        """The child's answer has come."""
        if message.number == self._number:
            self._is_ready = message.is_ready
            self._asked_at_s = None


logger = logging.getLogger(__name__)

# Messages of one child that are handled before others get their turn.
_MESSAGES_PER_TURN = 64
# Dead leases that the child is told of even if there is nothing else to say.
_MANY_LEASES = 8


@dataclass(frozen=True, slots=True)
class Remains:
    """The batches of a child that died: the one that it was executing, those whose answers were lost with it, and those
    that it never began, the oldest first."""

    executing: InFlightBatch | None
    executed: Sequence[InFlightBatch]
    unseen: Sequence[InFlightBatch]


class Listener(Protocol):
    """Whom the child's words concern that are not answers."""

    def on_began(self, began: Began) -> None: ...

    def on_readiness(self, message: Readiness) -> None: ...

    def on_measured(self, message: Measured) -> None: ...

    def on_progress(self) -> None:
        """A batch was answered, or the first of some was sent."""

    def on_call(self, message: Call, payload: bytearray | ByteView) -> None: ...

    def on_cancel_call(self, number: int) -> None: ...

    def on_call_read(self, message: CallRead) -> None: ...

    def on_ask(self, message: Ask) -> None: ...

    def on_caller_left(self, number: int) -> None: ...


class ChildConnection:
    """One child's batches, and the requests that it answers by itself."""

    def __init__(self, child: ChildProcess, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self.child = child
        self._channel = child.channel
        self._fd = child.channel.fileno()
        self._loop = loop
        self._listener = listener
        self._in_flight: dict[int, InFlightBatch] = {}
        self._senders: dict[int, ResponseSender] = {}
        self._last_batch = 0
        self._last_request = 0
        self._is_reading = True
        self._is_writing = False
        # One bound method, not one per request; `end` lets go of it.
        self._on_cancel: Callable[[InFlightRequest], None] | None = self._on_request_cancelled
        loop.add_reader(self._fd, self.read)

    @property
    def num_in_flight(self) -> int:
        """Batches that were sent and not answered."""
        return len(self._in_flight)

    def request(self, number: int) -> InFlightRequest | None:
        """The request of this number, if it belongs to a batch that is being executed."""
        for batch in self._in_flight.values():
            if number in batch.numbers:
                return batch.sent()[number - batch.numbers.start]
        return None

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send soon. When the child is gone this does nothing: `end` tells everyone."""
        try:
            self._channel.try_send(message, payload)
        except PeerGoneError:
            return
        if self._channel.has_unsent and not self._is_writing and self._is_reading:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._write)

    def send_batches(self, batches: Sequence[InFlightBatch]) -> None:
        """Send batches in one message. Raises OSError, with none of them sent, when there is no memory for it."""
        payload = Payload()
        message = Execute(number=self._last_batch + 1)
        for batch in batches:
            records = batch.write(self._last_request + 1, payload)
            if not records:
                batch.finish([])
                continue
            self._last_request += len(records)
            self._last_batch += 1
            self._in_flight[self._last_batch] = batch
            message.requests += records
            message.sizes.append(len(records))
            self._follow(batch)
        if not message.sizes:
            return
        try:
            self.send(message, payload)
        except OSError:
            for number in range(message.number, self._last_batch + 1):
                self._forget_senders(self._in_flight.pop(number))
            raise
        if len(self._in_flight) == len(message.sizes):
            self._listener.on_progress()

    def ask_ready(self, number: int) -> None:
        self.send(AskReady(number=number))

    def wait(self, timeout_s: float) -> bool:
        """Handle what the child says within that time; whether there was something."""
        if not self._is_reading or not self._channel.wait(timeout_s):
            return False
        self.read()
        return True

    def read(self) -> None:
        """Handle what has come."""
        channel = self._channel
        try:
            for _ in range(_MESSAGES_PER_TURN):
                received = channel.try_receive()
                if received is None:
                    break
                self._handle(*received)
                del received
                if not self._in_flight and not self._senders:
                    break  # nothing is expected: the loop tells if there is something all the same
        except PeerGoneError:
            self._stop_reading()
            return
        except msgspec.MsgspecError as error:
            # Whom it answers cannot be known, so nobody may go on waiting: the end of the process tells everyone.
            logger.error("%s said what cannot be understood, killing it: %s", self.child.name, error)
            self._stop_reading()
            self.child.kill()
            return
        if channel.num_unreturned > _MANY_LEASES:
            self.send(Released())

    def end(self, begun: int, failure: ServerError) -> Remains:
        """The child has ended, with `begun` the last batch that it began: what it leaves unanswered.

        The requests that it was to answer later, and had begun, get what it said last, or the failure.
        """
        while self._is_reading:
            self.read()
        self._channel.discard_unsent()
        self._on_cancel = None
        batches, self._in_flight = self._in_flight, {}
        remains = Remains(
            executing=batches.pop(begun, None),
            executed=[batch for number, batch in batches.items() if number < begun],
            unseen=[batch for number, batch in batches.items() if number > begun],
        )
        for batch in remains.unseen:
            self._forget_senders(batch)
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            _finish(sender, failure)
        return remains

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)
            if self._is_writing:
                self._is_writing = False
                self._loop.remove_writer(self._fd)

    def _write(self) -> None:
        try:
            self._channel.send_unsent()
        except PeerGoneError:
            self._channel.discard_unsent()
        if not self._channel.has_unsent:
            self._is_writing = False
            self._loop.remove_writer(self._fd)

    def _follow(self, batch: InFlightBatch) -> None:
        """Be told when callers leave, and keep the senders of those that are answered later."""
        number = batch.numbers.start
        for request in batch.sent():
            if request.is_cancelled:  # known before the model can ask
                self.send(Cancelled(number=number))
            sender = request.own_sender
            if sender is None:
                request.on_cancel = self._on_cancel
            else:
                self._senders[number] = sender
                on_cancel = partial(self._on_caller_left, number)
                sender.watch(on_cancel=on_cancel, on_room=partial(self._on_room, number))
            number += 1

    def _forget_senders(self, batch: InFlightBatch) -> None:
        if self._senders:
            for number in batch.numbers:
                self._senders.pop(number, None)

    def _on_request_cancelled(self, request: InFlightRequest) -> None:
        """`InFlightRequest.on_cancel`: rare, so the number is looked for only now."""
        for batch in self._in_flight.values():
            for position, sent in enumerate(batch.sent()):
                if sent is request:
                    self._on_caller_left(batch.numbers.start + position)
                    return

    def _on_caller_left(self, number: int) -> None:
        self.send(Cancelled(number=number))
        self._listener.on_caller_left(number)

    def _on_room(self, number: int) -> None:
        self.send(Room(number=number, has_room=True))

    def _handle(self, message: AnyMessage, payload: bytearray | ByteView) -> None:
        if type(message) is Executed:
            self._on_executed(message, payload)
        elif isinstance(message, Sent | SentTogether):
            self._on_sent(message, payload)
        elif isinstance(message, Measured):
            self._listener.on_measured(message)
        elif isinstance(message, Call):
            self._listener.on_call(message, payload)
        elif isinstance(message, CancelCall):
            self._listener.on_cancel_call(message.number)
        elif isinstance(message, CallRead):
            self._listener.on_call_read(message)
        elif isinstance(message, Ask):
            self._listener.on_ask(message)
        elif isinstance(message, Readiness):
            self._listener.on_readiness(message)
        elif isinstance(message, Began):
            self._listener.on_began(message)
        elif not isinstance(message, Released):
            logger.error("%s: unexpected message %s from the child process", self.child.name, type(message).__name__)

    def _on_executed(self, message: Executed, payload: bytearray | ByteView) -> None:
        position = 0
        records = message.responses
        for index, error in enumerate(message.errors):
            batch = self._in_flight.pop(message.number + index)
            duration_ns = message.durations_ns[index]
            if error is not None:
                self._forget_senders(batch)
                batch.finish(error.error(), duration_ns)
                continue
            count = len(batch.numbers)
            entries: list[InferResponse | ServerError | None] = []
            for record in records[position : position + count]:
                if record is None:
                    entries.append(None)
                else:
                    entries.append(response_of(record, payload))
                    if self._senders:
                        self._senders.pop(batch.numbers[len(entries) - 1], None)
            position += count
            batch.finish(entries, duration_ns)
        self._listener.on_progress()

    def _on_sent(self, message: Sent | SentTogether, payload: bytearray | ByteView) -> None:
        if isinstance(message, Sent):
            self._pass_on(message, payload)
            return
        for number, event, time_ns in message.notes:
            if number in self._senders:
                self._senders[number].note(event, time_ns)
        for number, record, is_final in message.sent:
            self._pass_on(Sent(number=number, response=record, is_final=is_final), payload)

    def _pass_on(self, message: Sent, payload: bytearray | ByteView) -> None:
        number = message.number
        sender = self._senders.get(number)
        if sender is None:  # the request has been ended by the server
            return
        if message.is_final:
            del self._senders[number]
        if message.is_dropped:
            return
        response = None if message.response is None else response_of(message.response, payload)
        try:
            if message.is_final:
                sender.finish(response)
            elif response is not None:
                sender.send(response, wait=False)
                if not sender.has_room:
                    self.send(Room(number=number, has_room=False))
        except ServerError as error:
            logger.error("%s: %s", self.child.name, error.message)
            self._senders.pop(number, None)
            self.send(Cancelled(number=number))


def _finish(sender: ResponseSender, failure: ServerError) -> None:
    try:
        sender.finish(failure)
    except ServerError:
        logger.debug("a request had ended before its process did")

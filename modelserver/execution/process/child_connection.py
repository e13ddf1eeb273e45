"""The server's end of the connection to one child process, on an event loop.

Everything here runs on that loop's thread, and handles the child's messages, and its end, as they arrive, without
blocking.
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

from modelserver.backend import InferResponse, ResponseSender, ServerCalls, ServerError
from modelserver.core.request import CallOrigin, InFlightRequest
from modelserver.execution.process.calls_from_child import ModelCalls
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
from modelserver.execution.process.packing import Payload, response_of, rows_of
from modelserver.execution.process.shared_buffer import ByteView

# How long the readiness endpoint may block the event loop for an idle child's answer.
_READINESS_WAIT_S = 0.005
# A child that takes longer to answer the readiness question is not ready.
_READINESS_LIMIT_S = 5.0


class ReadinessProbe:
    """A child's last answer to "are you ready?", and the open question, if any. Before the first answer it is not."""

    def __init__(self, *, is_asked: bool = False) -> None:
        self.is_asked = is_asked
        self._number = 0
        self._asked_at_s: float | None = None
        self._is_ready = not is_asked

    @property
    def is_ready(self) -> bool:
        if self.waited_s > _READINESS_LIMIT_S:
            return False
        return self._is_ready

    @property
    def waited_s(self) -> float:
        """How long the question has been open; 0 if it is answered."""
        return 0.0 if self._asked_at_s is None else time.monotonic() - self._asked_at_s

    def send(self, connection: ChildConnection) -> None:
        """Ask, unless a question is open. Called from the loop thread."""
        if self._asked_at_s is None:
            self._number += 1
            self._asked_at_s = time.monotonic()
            connection.ask_ready(self._number)

    def ask(self, connection: ChildConnection) -> None:
        """Ask, unless a question is open, and wait a moment for the answer. Called from the loop thread."""
        self.send(connection)
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

# At most this many messages of one child are handled in a turn.
_MESSAGES_PER_TURN = 64
# With more dead leases than this, they are returned even if there is no other message.
_MANY_LEASES = 8


@dataclass(frozen=True, slots=True)
class UnfinishedBatches:
    """The batches of a child that died, oldest first: the one in progress, those whose answers were lost, and those
    that were never begun."""

    executing: InFlightBatch | None
    executed: Sequence[InFlightBatch]
    unseen: Sequence[InFlightBatch]


class Listener(Protocol):
    """The child's instance, as its connection calls it."""

    def on_began(self, began: Began) -> None: ...

    def on_readiness(self, message: Readiness) -> None: ...

    def on_measured(self, message: Measured) -> None: ...

    def on_progress(self) -> None:
        """A batch was answered, or the first of several was sent."""


class ChildConnection:
    """One child's batches, the requests that it answers by itself, and its calls of other models."""

    def __init__(
        self,
        child: ChildProcess,
        loop: asyncio.AbstractEventLoop,
        listener: Listener,
        server: ServerCalls | None,
        origin: CallOrigin,
    ) -> None:
        self.child = child
        self.calls = ModelCalls(self.send, self.request, server, origin)
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
        """Batches that were sent and not yet answered."""
        return len(self._in_flight)

    def request(self, number: int) -> InFlightRequest | None:
        """The request of this number, if it belongs to a batch that is being executed."""
        for batch in self._in_flight.values():
            if number in batch.numbers:
                return batch.sent()[number - batch.numbers.start]
        return None

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send soon. Does nothing if the child is gone, because `end` handles all requests."""
        try:
            self._channel.try_send(message, payload)
        except PeerGoneError:
            return
        if self._channel.has_unsent and not self._is_writing and self._is_reading:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._write)

    def send_batches(self, batches: Sequence[InFlightBatch]) -> None:
        """Send batches in one message. Raises OSError, with none of them sent, if there is not enough memory."""
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
        """Wait for messages of the child and handle them; False if there were none."""
        if not self._is_reading or not self._channel.wait(timeout_s):
            return False
        self.read()
        return True

    def read(self) -> None:
        """Handle the messages that have arrived."""
        channel = self._channel
        try:
            for _ in range(_MESSAGES_PER_TURN):
                received = channel.try_receive()
                if received is None:
                    break
                self._handle(*received)
                del received
                if not self._in_flight and not self._senders:
                    break  # no answer is expected; the loop reports further messages
        except PeerGoneError:
            self._stop_reading()
            return
        except msgspec.MsgspecError as error:
            # It is unknown which request the message is for, so the child is killed, which fails all of them.
            logger.error("%s sent an invalid message, killing it: %s", self.child.name, error)
            self._stop_reading()
            self.child.kill()
            return
        if channel.num_unreturned > _MANY_LEASES:
            self.send(Released())

    def end(self, begun: int, failure: ServerError) -> UnfinishedBatches:
        """The child has ended. Returns the unanswered batches; `begun` is the number of the last batch that it began.

        Begun requests that it would have answered later get the responses that it sent, and then the failure.
        """
        while self._is_reading:
            self.read()
        self._channel.discard_unsent()
        self._on_cancel = None
        batches, self._in_flight = self._in_flight, {}
        unfinished = UnfinishedBatches(
            executing=batches.pop(begun, None),
            executed=[batch for number, batch in batches.items() if number < begun],
            unseen=[batch for number, batch in batches.items() if number > begun],
        )
        for batch in unfinished.unseen:
            self._forget_senders(batch)
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            _finish(sender, failure)
        return unfinished

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
        """Watch for callers that leave, and keep the senders of requests that are answered later."""
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
        """`InFlightRequest.on_cancel`. Cancels are rare, so the number is looked up only now."""
        for batch in self._in_flight.values():
            for position, sent in enumerate(batch.sent()):
                if sent is request:
                    self._on_caller_left(batch.numbers.start + position)
                    return

    def _on_caller_left(self, number: int) -> None:
        self.send(Cancelled(number=number))
        self.calls.cancel_for(number)

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
            self.calls.begin(message, payload)
        elif isinstance(message, CancelCall):
            self.calls.cancel(message.number)
        elif isinstance(message, CallRead):
            self.calls.read(message.number, message.count)
        elif isinstance(message, Ask):
            self.calls.answer(message)
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
        for rows in message.rows:
            for number, row in rows_of(rows):
                self._send_on(number, row, is_final=False)
        for number, record, is_final in message.sent:
            self._send_on(number, None if record is None else response_of(record, payload), is_final=is_final)

    def _pass_on(self, message: Sent, payload: bytearray | ByteView) -> None:
        if message.is_dropped:
            self._senders.pop(message.number, None)
            return
        response = None if message.response is None else response_of(message.response, payload)
        self._send_on(message.number, response, is_final=message.is_final)

    def _send_on(self, number: int, response: InferResponse | ServerError | None, *, is_final: bool) -> None:
        sender = self._senders.get(number)
        if sender is None:  # the request has been ended by the server
            return
        if is_final:
            del self._senders[number]
        try:
            if is_final:
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

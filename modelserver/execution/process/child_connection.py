"""The server's end of the connection to one child process, on an event loop.

Everything here runs on that loop's thread, and handles the child's messages, and its end, as they arrive, without
blocking.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from modelserver.backend import InferResponse, ResponseSender, ServerCalls, ServerError
from modelserver.core.long_work import Slices, long_work
from modelserver.core.request import CallOrigin, InFlightRequest
from modelserver.core.tensor import MAX_BYTES_IN_TURN
from modelserver.errors import InternalError
from modelserver.execution.process.calls_from_child import ModelCalls
from modelserver.execution.process.channel import PeerGoneError, Received
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
    RequestRecord,
    ResponseRecord,
    Room,
    Sent,
    SentTogether,
)
from modelserver.execution.process.packing import Payload, has_elements, response_of, response_slices, rows_of
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
# What records became that were unpacked before their message is handled, by their ids.
_Responses = Mapping[int, InferResponse | ServerError]
_NONE: _Responses = {}


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


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A message that waits for its turn: a long one is packed beside the loop. `batches` are those of an Execute."""

    message: Message
    payload: Payload
    batches: Sequence[InFlightBatch] = ()

    @property
    def is_long(self) -> bool:
        return self.payload.nbytes > MAX_BYTES_IN_TURN or any(batch.is_long for batch in self.batches)


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
        # In the order in which they are sent.
        self._outgoing: deque[_Outgoing] = deque()
        self._stop_packing: Callable[[], None] | None = None  # not None: the first one is being packed
        # The message whose tensors are being unpacked beside the loop: no other is read meanwhile.
        self._incoming: Received | None = None
        self._stop_unpacking: Callable[[], None] | None = None
        self._is_reading = True
        self._is_writing = False
        # One bound method, not one per request; `end` lets go of it.
        self._on_cancel: Callable[[InFlightRequest], None] | None = self._on_request_cancelled
        loop.add_reader(self._fd, self.read)

    @property
    def num_in_flight(self) -> int:
        """Batches that were sent, or are about to be, and not yet answered."""
        return len(self._in_flight) + sum([len(outgoing.batches) for outgoing in self._outgoing])

    def request(self, number: int) -> InFlightRequest | None:
        """The request of this number, if it belongs to a batch that is being executed."""
        for batch in self._in_flight.values():
            if number in batch.numbers:
                return batch.sent()[number - batch.numbers.start]
        return None

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send soon, after all earlier messages. Does nothing if the child is gone: `end` handles all requests.

        Raises OSError, if there is not enough memory for tensors of up to MAX_BYTES_IN_TURN.
        """
        if self._outgoing or (payload is not None and payload.nbytes > MAX_BYTES_IN_TURN):
            self._send_later(_Outgoing(message, payload or Payload()))
        else:
            self._send_now(message, payload)

    def _send_now(self, message: Message, payload: Payload | None = None) -> None:
        try:
            self._channel.try_send(message, payload)
        except PeerGoneError:
            return
        if self._channel.has_unsent and not self._is_writing and self._is_reading:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._write)

    def send_batches(self, batches: Sequence[InFlightBatch]) -> None:
        """Send batches in one message, soon, after all earlier messages. If there is not enough memory, they fail."""
        is_later = bool(self._outgoing)
        for batch in batches:
            is_later = is_later or batch.is_long
        payload = Payload()
        if is_later:
            self._send_later(_Outgoing(Execute(), payload, batches))
        else:
            self._send_written(batches, self._records(batches, payload), payload)

    def _send_later(self, outgoing: _Outgoing) -> None:
        self._outgoing.append(outgoing)
        self._send_outgoing()

    def _send_outgoing(self) -> None:
        """Send waiting messages up to the next long one, and begin to pack that."""
        while self._outgoing and self._stop_packing is None:
            first = self._outgoing[0]
            if first.is_long:
                self._stop_packing = long_work().start(self._packing(first), self._on_packed)
                return
            self._outgoing.popleft()
            if first.batches:
                self._send_written(first.batches, self._records(first.batches, first.payload), first.payload)
            else:
                self._send_now(first.message, first.payload)

    def _packing(self, outgoing: _Outgoing) -> Slices[list[list[RequestRecord]]]:
        """The records of the batches, whose tensors lie in shared memory afterwards."""
        payload = outgoing.payload
        for batch in outgoing.batches:
            yield from batch.preparing(payload)
        written = self._records(outgoing.batches, payload)
        if any(written) or not outgoing.batches:
            yield from self._channel.placing(payload)
        return written

    def _on_packed(self, result: Callable[[], list[list[RequestRecord]]]) -> None:
        self._stop_packing = None
        outgoing = self._outgoing.popleft()
        try:
            written = result()
        except Exception as error:
            self._fail(outgoing.batches, error)
            if not outgoing.batches:  # it would wait for the message
                self.child.kill()
        else:
            if outgoing.batches:
                self._send_written(outgoing.batches, written, outgoing.payload)
            else:
                self._send_now(outgoing.message, outgoing.payload)
        self._send_outgoing()

    def _fail(self, batches: Sequence[InFlightBatch], error: Exception) -> None:
        logger.error("%s: a message cannot be sent to its process: %s", self.child.name, error)
        for batch in batches:
            batch.finish(InternalError(f"{self.child.name}: a batch cannot be sent to its process: {error}"))

    def _records(self, batches: Sequence[InFlightBatch], payload: Payload) -> list[list[RequestRecord]]:
        """The records of each batch, which is to be sent next."""
        number = self._last_request + 1
        written = []
        for batch in batches:
            records = batch.write(number, payload)
            number += len(records)
            written.append(records)
        return written

    def _send_written(
        self, batches: Sequence[InFlightBatch], written: Sequence[list[RequestRecord]], payload: Payload
    ) -> None:
        message = Execute(number=self._last_batch + 1)
        for batch, records in zip(batches, written, strict=True):
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
            self._send_now(message, payload)
        except OSError as error:
            unsent = [self._in_flight.pop(number) for number in range(message.number, self._last_batch + 1)]
            for batch in unsent:
                self._forget_senders(batch)
            self._fail(unsent, error)
            return
        if len(self._in_flight) == len(message.sizes):
            self._listener.on_progress()

    def ask_ready(self, number: int) -> None:
        self.send(AskReady(number=number))

    def wait(self, timeout_s: float) -> bool:
        """Wait for messages of the child and handle them; False if there were none."""
        if not self._is_reading or self._incoming is not None or not self._channel.wait(timeout_s):
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
                if len(received[1]) > MAX_BYTES_IN_TURN and (records := _records_with_elements(received[0])):
                    self._unpack_later(received, records)
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

    def _unpack_later(self, received: Received, records: Sequence[ResponseRecord]) -> None:
        """Handle a message when its BYTES tensors have been unpacked beside the loop."""
        self._incoming = received
        self._loop.remove_reader(self._fd)
        self._stop_unpacking = long_work().start(_unpacking(records, received[1]), self._on_unpacked)

    def _on_unpacked(self, result: Callable[[], _Responses]) -> None:
        received, self._incoming = self._incoming, None
        assert received is not None, "it was unpacked"
        self._loop.add_reader(self._fd, self.read)
        self._handle(*received, result())

    def end(self, begun: int, failure: ServerError) -> UnfinishedBatches:
        """The child has ended. Returns the unanswered batches; `begun` is the number of the last batch that it began.

        Begun requests that it would have answered later get the responses that it sent, and then the failure.
        """
        if self._stop_packing is not None:
            self._stop_packing()
        while self._is_reading:
            self.read()
            if self._incoming is not None and self._stop_unpacking is not None:
                self._stop_unpacking()
                self._on_unpacked(dict)
        outgoing, self._outgoing = self._outgoing, deque()
        self._channel.discard_unsent()
        self._on_cancel = None
        batches, self._in_flight = self._in_flight, {}
        unfinished = UnfinishedBatches(
            executing=batches.pop(begun, None),
            executed=[batch for number, batch in batches.items() if number < begun],
            unseen=[
                *[batch for number, batch in batches.items() if number > begun],
                *[batch for message in outgoing for batch in message.batches],
            ],
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
                self._send_now(Cancelled(number=number))
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

    def _handle(self, message: AnyMessage, payload: bytearray | ByteView, unpacked: _Responses = _NONE) -> None:
        if type(message) is Executed:
            self._on_executed(message, payload, unpacked)
        elif isinstance(message, Sent | SentTogether):
            self._on_sent(message, payload, unpacked)
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

    def _on_executed(self, message: Executed, payload: bytearray | ByteView, unpacked: _Responses) -> None:
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
                    entries.append(unpacked.get(id(record)) or response_of(record, payload))
                    if self._senders:
                        self._senders.pop(batch.numbers[len(entries) - 1], None)
            position += count
            batch.finish(entries, duration_ns)
        self._listener.on_progress()

    def _on_sent(self, message: Sent | SentTogether, payload: bytearray | ByteView, unpacked: _Responses) -> None:
        if isinstance(message, Sent):
            self._pass_on(message, payload, unpacked)
            return
        for number, event, time_ns in message.notes:
            if number in self._senders:
                self._senders[number].note(event, time_ns)
        for rows in message.rows:
            for number, row in rows_of(rows):
                self._send_on(number, row, is_final=False)
        for number, record, is_final in message.sent:
            response = None if record is None else unpacked.get(id(record)) or response_of(record, payload)
            self._send_on(number, response, is_final=is_final)

    def _pass_on(self, message: Sent, payload: bytearray | ByteView, unpacked: _Responses) -> None:
        if message.is_dropped:
            self._senders.pop(message.number, None)
            return
        record = message.response
        response = None if record is None else unpacked.get(id(record)) or response_of(record, payload)
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


def _records_with_elements(message: AnyMessage) -> list[ResponseRecord]:
    """The responses in a message that have BYTES tensors, whose elements are copied when they are unpacked."""
    records: Sequence[ResponseRecord | None] = ()
    if isinstance(message, Executed):
        records = message.responses
    elif isinstance(message, Sent):
        records = [message.response]
    elif isinstance(message, SentTogether):
        records = [record for _number, record, _is_final in message.sent]
    return [record for record in records if record is not None and has_elements(record)]


def _unpacking(records: Sequence[ResponseRecord], payload: bytearray | ByteView) -> Slices[_Responses]:
    unpacked: dict[int, InferResponse | ServerError] = {}
    for record in records:
        unpacked[id(record)] = yield from response_slices(record, payload)
    return unpacked


def _finish(sender: ResponseSender, failure: ServerError) -> None:
    try:
        sender.finish(failure)
    except ServerError:
        logger.debug("a request had ended before its process did")

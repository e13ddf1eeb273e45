"""ModelStreamInfer: many requests on one call, whose responses share it."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from modelserver.core.long_work import at_once, long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Buffer, is_long
from modelserver.errors import UnavailableError
from modelserver.frontends.grpc import codec
from modelserver.frontends.grpc.decoder import InferDecoder
from modelserver.frontends.grpc.edge import as_server_error
from modelserver.planes.data import InferPlane
from modelserver.protocol.call import Parts, RpcError, StreamCall
from modelserver.protocol.grpc_status import status_of
from modelserver.protocol.limits import GrpcLimits


class _Slot(ResponseStream):
    """One request of the stream, or the error that prevented it, with responses that wait for their turn.

    The request has it as its stream, and it has the request until the last response is sent.
    """

    __slots__ = ("_owner", "held", "is_free", "request", "request_id")

    protocol = "GRPC"

    reads_later = True

    def __init__(self, owner: InferStream) -> None:
        super().__init__()
        self._owner = owner
        self.request: InFlightRequest | None = None
        self.request_id = ""
        self.held: list[InferResponse] | None = None
        self.is_free = False  # responses are sent as they come

    def deliver(self, response: InferResponse) -> None:
        if not self.is_finished:
            self.is_finished = response.is_final
            self._owner.take(self, response)


class InferStream:
    """One ModelStreamInfer call.

    A reader task submits requests until `max_stream_inflight` of them are unanswered, then leaves further messages to
    the flow control of the wire. Responses of decoupled models are sent as they come, all others in the order of their
    requests. The code that delivers them also sends them while the wire takes them at once; otherwise the call's own
    task does.
    """

    def __init__(self, call: StreamCall, dataplane: InferPlane, decoder: InferDecoder, limits: GrpcLimits) -> None:
        self._call = call
        self._dataplane = dataplane
        self._decode = decoder.decode_on_loop
        self._outline_slices = decoder.outline_slices
        self._element_slices = decoder.element_slices
        self._limits = limits
        self._headers = limits.access.forwarded(call.metadata)
        self._context = limits.access.context(call.metadata)
        access = limits.access
        self._caller = access.caller(call.metadata, call.peer) if access.callers_by else ""
        self._priority = access.priority(call.metadata)
        self._ends_on_error = str(call.metadata.get("triton_grpc_error", "")).lower() == "true"
        self._open: dict[_Slot, None] = {}  # requests whose last response was not sent, in their order
        self._turns: deque[_Slot] = deque()  # requests that are answered in order and have not ended
        self._outgoing: deque[tuple[_Slot, InferResponse]] = deque()  # what may be sent now
        # The call's own task sends, or sending has ended.
        self._is_sending = False
        self._has_room = asyncio.Event()
        self._has_news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the call to its end. Raises RpcError or ServerError to end it with a status.

        Cancelling this cancels all requests of the stream that are in flight.
        """
        self._reader = reader = asyncio.create_task(self._read(), name="grpc-stream-reader")
        reader.add_done_callback(lambda _: self._has_news.set())
        try:
            await self._write(reader)
            if reader.cancelled():
                raise UnavailableError("the server is shutting down; send further requests to another one")
            reader.result()
        finally:
            self._is_sending = True
            reader.cancel()
            slots = list(self._open)
            self._open.clear()
            self._turns.clear()
            self._outgoing.clear()
            for slot in slots:
                slot.is_finished = True  # later responses are dropped
                if slot.request is not None:
                    slot.request.cancel()
                    slot.request = None
            await asyncio.gather(reader, return_exceptions=True)

    def drain(self) -> None:
        """Read no further requests; the call ends when those in flight are answered."""
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        slots, most = self._open, self._limits.max_stream_inflight
        async for message in self._call.messages:
            await self._accept(message)
            while len(slots) >= most:
                self._has_room.clear()
                await self._has_room.wait()

    async def _accept(self, message: Buffer) -> None:
        slot = _Slot(self)
        self._open[slot] = None
        try:
            request = self._decode(message, slot)
            if isinstance(request, codec.LongRequest):
                request = await long_work().run(self._outline_slices(request, slot))
            if isinstance(request, codec.Outline):
                self._dataplane.check_inputs(request.request)
                request = await long_work().run(self._element_slices(request))
            slot.request = request
            slot.request_id = request.id
            request.deadline_ns = self._call.deadline_ns
            if self._headers is not None:
                request.forward(self._headers)
            if self._context:
                request.join_trace(self._context)
            request.caller = self._caller
            request.priority = request.priority or self._priority
            self._dataplane.infer(request)
            slot.is_free = request.is_decoupled
        except Exception as error:
            if slot.request is None:
                slot.request_id = codec.request_id(message, self._limits)
            else:
                slot.is_free = slot.request.is_decoupled
            slot.deliver(InferResponse(error=as_server_error(error)))
        self._place(slot)

    def _place(self, slot: _Slot) -> None:
        """Only once it is submitted it is known whose turn it is. The model may have answered already."""
        # Not part of `_accept`: an error's traceback holds that frame, which must not hold the error.
        turns, held = self._turns, slot.held
        if held is None or (turns and not slot.is_free):
            if not slot.is_free:
                turns.append(slot)
            return
        slot.held = None
        if not (slot.is_free or slot.is_finished):
            turns.append(slot)
        for response in held:
            self._push(slot, response)

    def take(self, slot: _Slot, response: InferResponse) -> None:
        """A response of a request has come."""
        turns = self._turns
        if response.is_final and turns and turns[0] is slot:
            self._push(slot, response)
            turns.popleft()
            self._advance()
            return
        if not slot.is_free and slot.request is not None and slot.request.is_decoupled and slot in turns:
            # A front process learns this with the first response: the request waits for no other, and no other for it.
            slot.is_free = True
            turns.remove(slot)
            self._advance()
        if slot.is_free or (turns and turns[0] is slot):
            self._push(slot, response)
        elif slot.held is None:
            slot.held = [response]
        else:
            slot.held.append(response)

    def _advance(self) -> None:
        """Release the responses that waited for their turn."""
        turns = self._turns
        while turns and (held := turns[0].held) is not None:
            slot = turns[0]
            slot.held = None
            if slot.is_finished:
                turns.popleft()
            for response in held:
                self._push(slot, response)
            if not slot.is_finished:
                return

    def _push(self, slot: _Slot, response: InferResponse) -> None:
        """The response may be sent: at once if possible without waiting, else by the call's own task."""
        outgoing, send_now = self._outgoing, self._call.send_now
        is_slow = self._ends_on_error or is_long(response.outputs, as_text=False)
        if outgoing or self._is_sending or send_now is None or is_slow:
            outgoing.append((slot, response))
            self._has_news.set()
            return
        parts = self._encode(slot, response)
        if parts is not None and not send_now(parts):
            outgoing.append((slot, response))
            self._has_news.set()
            return
        self._has_sent(slot, response)
        if not self._open and self._reader is not None and self._reader.done():
            self._has_news.set()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        while True:
            # Cleared before looking, so that responses that arrive during a send are not missed.
            self._has_news.clear()
            self._is_sending = True
            await self._send_ready()
            self._is_sending = False
            if not self._open and reader.done():
                return
            await self._has_news.wait()

    async def _send_ready(self) -> None:
        while self._outgoing:
            slot, response = self._outgoing[0]
            if is_long(response.outputs, as_text=False):
                parts = await long_work().run(at_once(partial(self._encode, slot, response)))
            else:
                parts = self._encode(slot, response)
            if parts is not None:
                await self._call.send(parts)
            self._outgoing.popleft()
            self._has_sent(slot, response)

    def _has_sent(self, slot: _Slot, response: InferResponse) -> None:
        if response.is_final:
            self._open.pop(slot, None)
            slot.request = None
            self._has_room.set()
        else:
            slot.has_read()

    def _encode(self, slot: _Slot, response: InferResponse) -> Parts | None:
        """The message to send for a response, if any. Raises RpcError if an error ends the call."""
        error = response.error
        request = slot.request
        if error is None:
            assert request is not None, "only a submitted request has a response without an error"
            if response.is_final and response.is_empty and not request.wants_empty_final:
                return None
            try:
                return codec.encode_stream_response(request, response)
            except Exception as unexpected:
                error = as_server_error(unexpected)
        if self._ends_on_error:
            raise RpcError(*status_of(error))
        model_name = "" if request is None else request.model_name
        return (codec.encode_stream_error(slot.request_id, error, model_name, is_final=response.is_final),)

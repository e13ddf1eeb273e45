"""ModelStreamInfer: many requests on one call, answered in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Buffer
from modelserver.errors import UnavailableError
from modelserver.frontends.grpc import codec
from modelserver.frontends.grpc.call import Parts, RpcError, StreamCall
from modelserver.frontends.grpc.decoder import InferDecoder
from modelserver.frontends.grpc.edge import as_server_error
from modelserver.frontends.grpc.parameters import EMPTY_FINAL_RESPONSE
from modelserver.frontends.grpc.status import status_of

if TYPE_CHECKING:
    from modelserver.dataplane import DataPlane


class _Slot(ResponseStream):
    """One request of the stream, or the error that it met before it was one, with its unsent responses.

    The request has it as its stream, and it has the request until the last response is sent.
    """

    __slots__ = ("_owner", "request", "request_id", "responses")

    def __init__(self, owner: InferStream) -> None:
        super().__init__()
        self._owner = owner
        self.request: InferRequest | None = None
        self.request_id = ""
        self.responses: deque[InferResponse] = deque()

    def deliver(self, response: InferResponse) -> None:
        if not self.is_finished:
            self.is_finished = response.is_final
            self.responses.append(response)
            self._owner.tell(self)


class InferStream:
    """One ModelStreamInfer call.

    A reader task submits requests until `max_stream_inflight` of them are unanswered, then leaves
    further messages to the flow control of the wire. Responses are sent where they are delivered, as long as
    they come in the order of their requests and the wire takes them at once; else by the call's own task.
    """

    def __init__(self, call: StreamCall, dataplane: DataPlane, decoder: InferDecoder, limits: codec.GrpcLimits) -> None:
        self._call = call
        self._dataplane = dataplane
        self._decode = decoder.decode
        self._limits = limits
        self._ends_on_error = str(call.metadata.get("triton_grpc_error", "")).lower() == "true"
        self._slots: deque[_Slot] = deque()
        # The call's own task is, or nobody may any more.
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
            slots = list(self._slots)
            self._slots.clear()
            for slot in slots:
                if slot.request is not None:
                    slot.request.cancel()
                    slot.request = None
            await asyncio.gather(reader, return_exceptions=True)

    def drain(self) -> None:
        """Read no further requests; the call ends when those in flight are answered."""
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        slots, most = self._slots, self._limits.max_stream_inflight
        async for message in self._call.messages:
            self._accept(message)
            while len(slots) >= most:
                self._has_room.clear()
                await self._has_room.wait()

    def _accept(self, message: Buffer) -> None:
        slot = _Slot(self)
        self._slots.append(slot)
        try:
            slot.request = request = self._decode(message, slot)
            slot.request_id = request.id
            request.deadline_ns = self._call.deadline_ns
            self._dataplane.infer(request)
        except Exception as error:
            if slot.request is None:
                slot.request_id = codec.request_id(message)
            slot.deliver(InferResponse(error=as_server_error(error)))

    def tell(self, slot: _Slot) -> None:
        """A response of a request has come."""
        if self._is_sending or slot is not self._slots[0]:
            return
        if not self._send_ready_now():
            self._has_news.set()

    def _send_ready_now(self) -> bool:
        """As `_send_ready`, without waiting; False when something is left for the call's own task to do."""
        send_now, slots = self._call.send_now, self._slots
        if send_now is None or self._ends_on_error:
            return False
        while slots and slots[0].responses:
            slot = slots[0]
            parts = self._encode(slot, slot.responses[0])
            if parts is not None and not send_now(parts):
                return False
            self._has_sent(slot)
        return bool(slots) or self._reader is None or not self._reader.done()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        while True:
            # Cleared before looking: news that arrive during a send are not missed.
            self._has_news.clear()
            self._is_sending = True
            await self._send_ready()
            self._is_sending = False
            if not self._slots and reader.done():
                return
            await self._has_news.wait()

    async def _send_ready(self) -> None:
        """Send what the oldest request has; go on to the next one after its final response."""
        while self._slots and self._slots[0].responses:
            slot = self._slots[0]
            parts = self._encode(slot, slot.responses[0])
            if parts is not None:
                await self._call.send(parts)
            self._has_sent(slot)

    def _has_sent(self, slot: _Slot) -> None:
        if slot.responses.popleft().is_final:
            self._slots.popleft()
            slot.request = None
            self._has_room.set()

    def _encode(self, slot: _Slot, response: InferResponse) -> Parts | None:
        """What to send for a response, which may be nothing. Raises RpcError where an error ends the call."""
        error = response.error
        request = slot.request
        if error is None:
            assert request is not None, "only a submitted request has a response without an error"
            if _is_empty_final(response) and not request.parameters.get(EMPTY_FINAL_RESPONSE):
                return None
            try:
                return codec.encode_stream_response(request, response)
            except Exception as unexpected:
                error = as_server_error(unexpected)
        if self._ends_on_error:
            raise RpcError(*status_of(error))
        return (codec.encode_stream_error(slot.request_id, error),)


def _is_empty_final(response: InferResponse) -> bool:
    return response.is_final and not response.outputs and not response.parameters

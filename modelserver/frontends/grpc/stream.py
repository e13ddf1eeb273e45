"""ModelStreamInfer: many requests on one call, answered in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError, UnavailableError
from modelserver.frontends.grpc import codec
from modelserver.frontends.grpc.call import RpcError, StreamCall
from modelserver.frontends.grpc.edge import as_server_error
from modelserver.frontends.grpc.parameters import EMPTY_FINAL_RESPONSE
from modelserver.frontends.grpc.status import status_of

if TYPE_CHECKING:
    from modelserver.dataplane import DataPlane


class _Slot:
    """One request of the stream, or the error that it met before it was one, with its unsent responses."""

    __slots__ = ("request", "request_id", "responses")

    def __init__(self, request: InferRequest | None, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.responses: deque[InferResponse] = deque()


class InferStream:
    """One ModelStreamInfer call.

    A reader task submits requests until `max_stream_inflight` of them are unanswered, then leaves
    further messages to the flow control of the wire. The call's own task sends the responses.
    """

    def __init__(self, call: StreamCall, dataplane: DataPlane, limits: codec.GrpcLimits) -> None:
        self._call = call
        self._dataplane = dataplane
        self._limits = limits
        self._ends_on_error = str(call.metadata.get("triton_grpc_error", "")).lower() == "true"
        self._slots: deque[_Slot] = deque()
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
            reader.cancel()
            for slot in self._slots:
                if slot.request is not None:
                    slot.request.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def drain(self) -> None:
        """Read no further requests; the call ends when those in flight are answered."""
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        async for message in self._call.messages:
            self._accept(message)
            while len(self._slots) >= self._limits.max_stream_inflight:
                self._has_room.clear()
                await self._has_room.wait()

    def _accept(self, message: Buffer) -> None:
        try:
            request = codec.decode_infer_request(message, self._limits)
        except Exception as error:
            refused = _Slot(None, codec.request_id(message))
            self._slots.append(refused)
            self._take(refused, InferResponse(error=as_server_error(error)))
            return
        request.deadline_ns = self._call.deadline_ns
        slot = _Slot(request, request.id)
        self._slots.append(slot)
        try:
            self._dataplane.infer(request).subscribe(lambda response: self._take(slot, response))
        except Exception as error:
            self._take(slot, InferResponse(error=as_server_error(error)))

    def _take(self, slot: _Slot, response: InferResponse) -> None:
        slot.responses.append(response)
        if slot is self._slots[0]:
            self._has_news.set()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        while True:
            # Cleared before looking: news that arrive during a send are not missed.
            self._has_news.clear()
            await self._send_ready()
            if not self._slots and reader.done():
                return
            await self._has_news.wait()

    async def _send_ready(self) -> None:
        """Send what the oldest request has; go on to the next one after its final response."""
        while self._slots and self._slots[0].responses:
            slot = self._slots[0]
            response = slot.responses.popleft()
            await self._send(slot, response)
            if response.is_final:
                self._slots.popleft()
                self._has_room.set()

    async def _send(self, slot: _Slot, response: InferResponse) -> None:
        error = response.error
        if error is None:
            assert slot.request is not None, "only a submitted request has a response without an error"
            if _is_empty_final(response) and not slot.request.parameters.get(EMPTY_FINAL_RESPONSE):
                return
            try:
                parts = codec.encode_stream_response(slot.request, response)
            except Exception as unexpected:
                error = as_server_error(unexpected)
        if error is not None:
            parts = (self._encode_error(slot, error),)
        await self._call.send(parts)

    def _encode_error(self, slot: _Slot, error: ServerError) -> bytes:
        if self._ends_on_error:
            raise RpcError(*status_of(error))
        return codec.encode_stream_error(slot.request_id, error)


def _is_empty_final(response: InferResponse) -> bool:
    return response.is_final and not response.outputs and not response.parameters

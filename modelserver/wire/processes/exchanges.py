"""The core's side of forwarded HTTP requests and gRPC calls, answered by the frontends that have the planes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from modelserver.core.tensor import Buffer
from modelserver.protocol.call import GrpcHandler, Parts, RpcError, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.response import HttpResponse
from modelserver.wire.processes.link import Joined, Link, Window
from modelserver.wire.processes.messages import (
    Content,
    Credit,
    Ended,
    Exchange,
    FrontBundle,
    HalfClose,
    Open,
    Piece,
    Replied,
    Responded,
    Started,
    Unary,
    portable,
)

_logger = logging.getLogger(__name__)


class ForwardedExchanges:
    """The forwarded requests of one front that are in progress. Event loop thread only."""

    def __init__(self, http: HttpHandler | None, grpc: GrpcHandler | None, link: Link[FrontBundle]) -> None:
        """A frontend is None where no port serves its protocol; then nothing of it is forwarded."""
        self._http = http
        self._grpc = grpc
        self.link = link
        self._calls: dict[int, _Exchange | _Call | _Stream] = {}

    def exchange(self, message: Exchange) -> None:
        """Have an HTTP request answered."""
        assert self._http is not None, "no port has HTTP"
        exchange = _Exchange(self, message)
        self._calls[message.call] = exchange
        self._http.handle(exchange)

    def unary(self, message: Unary) -> None:
        """Have a gRPC call answered."""
        assert self._grpc is not None, "no port has gRPC"
        unary = self._grpc.methods[message.path].unary
        assert unary is not None, f"{message.path} is a stream"
        call = _Call(self, message)
        self._calls[message.call] = call
        unary(call)

    def open(self, message: Open) -> None:
        """Begin a streaming gRPC call."""
        assert self._grpc is not None, "no port has gRPC"
        method = self._grpc.methods[message.path].stream
        assert method is not None, f"{message.path} is not a stream"
        stream = _Stream(self, message)
        self._calls[message.call] = stream
        stream.start(method(stream.call))

    def piece(self, message: Piece | HalfClose) -> None:
        """The client's next message, or their end, for a stream that may have ended by now."""
        stream = self._calls.get(message.call)
        if isinstance(stream, _Stream):
            stream.take(message)

    def credit(self, message: Credit) -> None:
        """The front has sent pieces of an answer that may have ended by now."""
        call = self._calls.get(message.call)
        if isinstance(call, _Stream | _Exchange):
            call.window.grant(message.num_pieces)

    def cancel(self, number: int) -> None:
        """The client of this request left."""
        call = self._calls.get(number)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """The front is gone, and with it all its clients."""
        for call in list(self._calls.values()):
            call.cancel()

    def end(self, number: int) -> None:
        """The final message is on its way."""
        self._calls.pop(number, None)

    def bytes_of(self, content: Content) -> Buffer:
        """Content as a frontend takes it."""
        data = self.link.view(content)
        return data if isinstance(data, bytes) else data.data


class _Exchange(HttpExchange):
    """An HTTP request, whose answer goes to the front."""

    __slots__ = ("_exchanges", "_is_started", "_number", "_peer", "window")

    def __init__(self, exchanges: ForwardedExchanges, message: Exchange) -> None:
        self.head = HttpHead(message.method, message.path, message.headers, message.query, message.names)
        self.body = exchanges.bytes_of(message.body)
        self.on_disconnect = None
        self.window = Window()
        self._exchanges = exchanges
        self._number = message.call
        self._peer = message.peer
        self._is_started = False

    @property
    def peer(self) -> str:
        return self._peer

    def respond(self, response: HttpResponse) -> None:
        self._exchanges.end(self._number)
        self._exchanges.link.send_with(
            self._number,
            Joined(response.body),
            partial(Responded, self._number, response.status, list(response.headers)),
        )

    def start(self, status: int, headers: list[tuple[str, str]]) -> _Writer:
        self._is_started = True
        self._exchanges.link.send(Started(self._number, status, headers))
        return _Writer(self, self._exchanges.link, self._number)

    def finish(self, status: int = Status.OK) -> None:
        """The last piece of the body was written, or the reader has left; another status breaks the answer off."""
        self.window.close()
        self._exchanges.end(self._number)
        self._exchanges.link.send(Ended(self._number, status, ""))

    def cancel(self) -> None:
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if self._is_started:
            self.finish()
        if on_disconnect is not None:
            on_disconnect()


class _Writer:
    """A body that goes to the front piece by piece."""

    def __init__(self, exchange: _Exchange, link: Link[FrontBundle], number: int) -> None:
        self._exchange = exchange
        self._link = link
        self._number = number
        self._unsent: Buffer | None = None  # that the window had no room for

    def send(self, data: Buffer) -> bool:
        """Send `data`, or keep it for `wait_for_room`. Raises ConnectionError when the client left."""
        window = self._exchange.window
        if not window.try_take():
            assert self._unsent is None, "the caller has awaited room"
            self._unsent = data
            return False
        self._link.send_with(self._number, Joined((data,)), partial(Piece, self._number))
        return window.has_room

    async def wait_for_room(self) -> None:
        """Send what was kept. Raises ConnectionError when the client left."""
        await self._exchange.window.wait()
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            await self.write(unsent)

    async def write(self, data: Buffer) -> None:
        """Send `data`. Raises ConnectionError when the client left."""
        await self._exchange.window.take()
        self._link.send_with(self._number, Joined((data,)), partial(Piece, self._number))

    async def close(self) -> None:
        """End the body."""
        if not self._exchange.window.is_closed:
            self._exchange.finish()

    def abort(self) -> None:
        """Break the answer off."""
        if not self._exchange.window.is_closed:
            self._exchange.finish(Status.INTERNAL)


class _Call(UnaryCall):
    """A gRPC call, whose reply goes to the front."""

    __slots__ = ("_exchanges", "_number", "_peer")

    def __init__(self, exchanges: ForwardedExchanges, message: Unary) -> None:
        self.message = exchanges.bytes_of(message.content)
        self.metadata = message.metadata
        self.deadline_ns = message.deadline_ns
        self.on_cancel = None
        self._exchanges = exchanges
        self._number = message.call
        self._peer = message.peer

    @property
    def peer(self) -> str:
        return self._peer

    def reply(self, parts: Parts) -> None:
        self._exchanges.end(self._number)
        self._exchanges.link.send_with(self._number, Joined(parts), partial(Replied, self._number))

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        self._exchanges.end(self._number)
        self._exchanges.link.send(Ended(self._number, status, portable(text), retry_ms))

    def cancel(self) -> None:
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()


class _Stream:
    """A streaming gRPC call: a Task of the core's frontend, fed by pieces."""

    def __init__(self, exchanges: ForwardedExchanges, message: Open) -> None:
        self.window = Window()
        self.call = StreamCall(self._messages(), self._send, message.metadata, message.deadline_ns)
        self._exchanges = exchanges
        self._number = message.call
        self._incoming: asyncio.Queue[Content | None] = asyncio.Queue()  # bounded by the front's window
        self._task: asyncio.Task[None]

    def start(self, work: Any) -> None:
        """Run the call's handler."""
        self._task = asyncio.get_running_loop().create_task(self._serve(work))

    def take(self, message: Piece | HalfClose) -> None:
        self._incoming.put_nowait(message.content if isinstance(message, Piece) else None)

    def cancel(self) -> None:
        self.window.close()
        self._task.cancel()

    async def _serve(self, work: Any) -> None:
        status: int = Status.CANCELLED
        text = "the call was cancelled"
        try:
            await work
            status, text = Status.OK, ""
        except RpcError as error:
            status, text = error.status, error.message
        except ConnectionResetError:
            pass  # the client left while a message was to be sent
        except Exception:
            _logger.exception("unexpected error in a streaming gRPC call")
            status, text = Status.INTERNAL, "internal error; the server's log has the details"
        finally:
            self._exchanges.end(self._number)
            self._exchanges.link.send(Ended(self._number, status, portable(text)))

    async def _messages(self) -> AsyncIterator[Buffer]:
        while (content := await self._incoming.get()) is not None:
            self._exchanges.link.send(Credit(self._number, 1))
            yield self._exchanges.bytes_of(content)

    async def _send(self, parts: Parts) -> None:
        await self.window.take()
        self._exchanges.link.send_with(self._number, Joined(parts), partial(Piece, self._number))

"""Carries gRPC calls from grpcio's asyncio server to a table of handlers. Messages stay bytes on both sides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from modelserver.errors import UnavailableError
from modelserver.protocol.call import GrpcHandler, Method, Parts, RpcError, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import PUSHBACK, Status
from modelserver.wire.address import Address, authority
from modelserver.wire.context import DISMISSAL
from modelserver.wire.limits import WireLimits

_logger = logging.getLogger(__name__)

_INT32_MAX = (1 << 31) - 1
# For what was given up, to be told so.
_LAST_WORDS_S = 1.0
_STATUS = {code.value[0]: code for code in grpc.StatusCode}
# `--grpc-infer-response-compression-level` -> grpc_compression_level; the core picks an algorithm the client accepts.
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


def channel_arguments(limits: WireLimits, *, reuse_port: bool = False) -> list[tuple[str, int]]:
    """The limits as grpcio takes them; what it has no argument for has no effect here."""
    keepalive = limits.keepalive
    arguments: dict[str, int | None] = {
        "grpc.so_reuseport": int(reuse_port),
        "grpc.max_receive_message_length": limits.max_message_bytes,
        "grpc.max_send_message_length": _INT32_MAX,
        "grpc.keepalive_time_ms": _ms(keepalive.ping_after_s),
        "grpc.keepalive_timeout_ms": _ms(keepalive.ping_timeout_s),
        "grpc.keepalive_permit_without_calls": int(keepalive.ping_without_calls),
        "grpc.http2.max_pings_without_data": keepalive.max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": _ms(keepalive.min_ping_interval_s),
        "grpc.http2.max_ping_strikes": keepalive.max_ping_strikes,
        "grpc.max_connection_age_ms": _ms(keepalive.max_age_s),
        "grpc.max_connection_age_grace_ms": _ms(keepalive.max_age_grace_s),
        "grpc.default_compression_level": _COMPRESSION_LEVELS[limits.grpc_compression] or None,
    }
    return [(name, value) for name, value in arguments.items() if value is not None]


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


class GrpcioServer:
    """Listens on one address from `start` to `stop`. Used on the event loop thread."""

    def __init__(self, frontend: GrpcHandler, address: Address, limits: WireLimits | None = None) -> None:
        self._frontend = frontend
        self._address = address
        self._limits = limits or WireLimits()
        self._server: grpc.aio.Server | None = None
        self._open = _OpenCalls()

    @property
    def port(self) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self._address.port

    async def start(self) -> None:
        """Listen. Raises UnavailableError, naming the flag, when the address cannot be had."""
        if self.port:
            # grpcio would not tell why it cannot, and prints to stderr.
            self._address.bind().close()
        reuse_port = self._address.reuse_port
        server = grpc.aio.server(options=channel_arguments(self._limits, reuse_port=reuse_port))
        server.add_generic_rpc_handlers((_MethodTable(self._frontend.methods, self._open),))
        try:
            port = server.add_insecure_port(authority(self._address.host, self.port))
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen for gRPC on {authority(self._address.host, self.port)}: {error}; choose another "
                f"address with {self._address.address_flag} or another port with {self._address.port_flag}"
            ) from None
        self._address = replace(self._address, port=port)
        await server.start()
        self._server = server
        _logger.info("gRPC listens on %s", authority(self._address.host, port))

    def retire(self) -> None:
        """No answer can say so; when it stops, grpcio sends GOAWAY."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, let those in flight finish for `grace_s`, then tell the rest that it will not."""
        server, self._server = self._server, None
        if server is None:
            return
        self._frontend.drain()
        stopping = asyncio.ensure_future(server.stop(grace_s + _LAST_WORDS_S))
        try:
            await asyncio.wait({stopping}, timeout=grace_s)
            self._open.dismiss()
            await stopping
        finally:
            stopping.cancel()


class _OpenCalls:
    """The calls that are not answered, so that they can be told when they will not be."""

    def __init__(self) -> None:
        self.unary: set[_Call] = set()
        self.streams: set[asyncio.Future[Any]] = set()

    def dismiss(self) -> None:
        """End all of them with UNAVAILABLE."""
        for call in [call for call in self.unary if not call.is_answered]:
            call.fail(Status.UNAVAILABLE, DISMISSAL)
            if call.on_cancel is not None:
                call.on_cancel()
        for serving in list(self.streams):
            serving.cancel()


class _MethodTable(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """Finds the handler of a path; what is not in the table is UNIMPLEMENTED."""

    def __init__(self, methods: Mapping[str, Method], calls: _OpenCalls) -> None:
        self._handlers = {path: _rpc_method_handler(method, calls) for path, method in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def _rpc_method_handler(method: Method, calls: _OpenCalls) -> grpc.RpcMethodHandler:
    if method.unary is not None:
        return grpc.unary_unary_rpc_method_handler(_unary_behaviour(method.unary, calls.unary))
    assert method.stream is not None, "a method is unary or a stream"
    return grpc.stream_stream_rpc_method_handler(_stream_behaviour(method.stream, calls.streams))


class _ContextMetadata(Mapping[str, str | bytes]):
    """A call's metadata, read when somebody asks for it: most handlers never do. Of equal keys the last counts."""

    __slots__ = ("_context", "_items")

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context
        self._items: dict[str, str | bytes] | None = None

    def _read(self) -> dict[str, str | bytes]:
        if self._items is None:
            self._items = dict(self._context.invocation_metadata() or ())
        return self._items

    def __getitem__(self, key: str) -> str | bytes:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class _Call(UnaryCall):
    """A unary call: what its handler said, and a future for the case that it says so later."""

    __slots__ = ("_context", "_waiter", "answer", "is_answered", "retry_ms", "status", "text")

    def __init__(self, message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.message = message
        self._context = context
        self.metadata = _ContextMetadata(context)
        self.deadline_ns = _deadline_ns(context)
        self.on_cancel = None
        self.is_answered = False
        self.answer: Parts = ()
        self.status = 0
        self.text = ""
        self.retry_ms = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def peer(self) -> str:
        """As grpcio writes it, with the kind of the address before it."""
        return str(self._context.peer()).partition(":")[2]

    def reply(self, parts: Parts) -> None:
        if not self.is_answered:  # else it was given up
            self.answer = parts
            self._give()

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        if self.is_answered:
            return
        self.status = status
        self.text = text
        self.retry_ms = retry_ms
        self._give()

    def answered(self) -> asyncio.Future[None]:
        """Done when the answer, which is not there yet, is given."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _give(self) -> None:
        self.is_answered = True
        # The waiter is done already when the client cancelled.
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _unary_behaviour(
    handle: Callable[[UnaryCall], None], unanswered: set[_Call]
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def behave(message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        call = _Call(message, context)
        handle(call)
        if not call.is_answered:
            unanswered.add(call)
            try:
                await call.answered()
            except asyncio.CancelledError:
                # The client left, its deadline passed, or the server's grace is over.
                if call.on_cancel is not None:
                    call.on_cancel()
                raise
            finally:
                unanswered.discard(call)
        if call.status:
            pushback = ((PUSHBACK, str(call.retry_ms)),) if call.retry_ms else ()
            await context.abort(_STATUS[call.status], call.text, pushback)
        return _join(call.answer)

    return behave


def _stream_behaviour(
    handle: Callable[[StreamCall], Awaitable[Any]], streams: set[asyncio.Future[Any]]
) -> Callable[[AsyncIterator[bytes], Any], Awaitable[None]]:
    async def behave(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async def send(parts: Parts) -> None:
            await context.write(_join(parts))

        peer = str(context.peer()).partition(":")[2]
        call = StreamCall(messages, send, _ContextMetadata(context), _deadline_ns(context), peer=peer)
        serving = asyncio.ensure_future(handle(call))
        streams.add(serving)
        try:
            await asyncio.wait({serving})
        except asyncio.CancelledError:  # the client left, or its deadline passed
            serving.cancel()
            await asyncio.wait({serving})
            raise
        finally:
            streams.discard(serving)
        if serving.cancelled():
            await context.abort(grpc.StatusCode.UNAVAILABLE, DISMISSAL)
        try:
            serving.result()
        except RpcError as error:
            await context.abort(_STATUS[error.status], error.message)

    return behave


def _join(parts: Parts) -> bytes:
    only = parts[0] if len(parts) == 1 else b"".join(parts)
    return only if isinstance(only, bytes) else bytes(only)


def _deadline_ns(context: grpc.aio.ServicerContext[bytes, bytes]) -> int | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic_ns() + int(remaining_s * 1e9)

"""Carries gRPC calls from grpcio's asyncio server to a table of handlers. Messages stay bytes on both sides."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from modelserver.errors import ServerError, UnavailableError
from modelserver.frontends.grpc.call import Frontend, Method, Parts, RpcError, StreamCall, UnaryCall

_logger = logging.getLogger(__name__)

_INT32_MAX = (1 << 31) - 1
_STATUS = {code.value[0]: code for code in grpc.StatusCode}
# `--grpc-infer-response-compression-level` -> grpc_compression_level; the core picks an algorithm the client accepts.
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


@dataclass(frozen=True, slots=True)
class GrpcioOptions:
    """What an operator can set, under Triton's names without `grpc-`; None leaves grpcio's default."""

    reuse_port: bool = False
    max_receive_bytes: int = _INT32_MAX
    max_send_bytes: int = _INT32_MAX
    response_compression_level: str = "none"
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int | None = None
    max_connection_age_grace_ms: int | None = None

    def channel_arguments(self) -> list[tuple[str, int]]:
        """The same as grpcio's channel arguments."""
        arguments: dict[str, int | None] = {
            "grpc.so_reuseport": int(self.reuse_port),
            "grpc.max_receive_message_length": self.max_receive_bytes,
            "grpc.max_send_message_length": self.max_send_bytes,
            "grpc.keepalive_time_ms": self.keepalive_time_ms,
            "grpc.keepalive_timeout_ms": self.keepalive_timeout_ms,
            "grpc.keepalive_permit_without_calls": int(self.keepalive_permit_without_calls),
            "grpc.http2.max_pings_without_data": self.http2_max_pings_without_data,
            "grpc.http2.min_ping_interval_without_data_ms": self.http2_min_recv_ping_interval_without_data_ms,
            "grpc.http2.max_ping_strikes": self.http2_max_ping_strikes,
            "grpc.max_connection_age_ms": self.max_connection_age_ms,
            "grpc.max_connection_age_grace_ms": self.max_connection_age_grace_ms,
            "grpc.default_compression_level": _COMPRESSION_LEVELS[self.response_compression_level] or None,
        }
        return [(name, value) for name, value in arguments.items() if value is not None]


class GrpcioServer:
    """Listens on one address from `start` to `stop`. Used on the event loop thread."""

    def __init__(self, frontend: Frontend, host: str, port: int, options: GrpcioOptions | None = None) -> None:
        """`port` 0 takes any free one; `self.port` is the real one after `start`."""
        self._frontend = frontend
        self._host = host
        self._options = options or GrpcioOptions()
        self._server: grpc.aio.Server | None = None
        self.port = port

    async def start(self) -> None:
        """Raises UnavailableError when the address cannot be listened on."""
        if self.port:
            _check_address(self._host, self.port, reuse_port=self._options.reuse_port)
        server = grpc.aio.server(options=self._options.channel_arguments())
        server.add_generic_rpc_handlers((_MethodTable(self._frontend.methods),))
        try:
            self.port = server.add_insecure_port(_authority(self._host, self.port))
        except RuntimeError as error:
            raise _address_error(self._host, self.port, str(error)) from None
        await server.start()
        self._server = server
        _logger.info("gRPC server listens on %s", _authority(self._host, self.port))

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, give those in flight `grace_s` seconds to finish, then cancel them."""
        server, self._server = self._server, None
        if server is None:
            return
        self._frontend.drain()
        await server.stop(grace_s)


class _MethodTable(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """Finds the handler of a path; what is not in the table is UNIMPLEMENTED."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._handlers = {path: _rpc_method_handler(method) for path, method in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def _rpc_method_handler(method: Method) -> grpc.RpcMethodHandler:
    if method.unary is not None:
        return grpc.unary_unary_rpc_method_handler(_unary_behaviour(method.unary))
    assert method.stream is not None, "a method is unary or a stream"
    return grpc.stream_stream_rpc_method_handler(_stream_behaviour(method.stream))


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

    __slots__ = ("_waiter", "answer", "is_answered", "status", "text")

    def __init__(self, message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.message = message
        self.metadata = _ContextMetadata(context)
        self.deadline_ns = _deadline_ns(context)
        self.on_cancel = None
        self.is_answered = False
        self.answer: Parts = ()
        self.status = 0
        self.text = ""
        self._waiter: asyncio.Future[None] | None = None

    def reply(self, parts: Parts) -> None:
        self.answer = parts
        self._give()

    def fail(self, status: int, text: str) -> None:
        self.status = status
        self.text = text
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


def _unary_behaviour(handle: Callable[[UnaryCall], None]) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def behave(message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        call = _Call(message, context)
        handle(call)
        if not call.is_answered:
            try:
                await call.answered()
            except asyncio.CancelledError:
                # The client left, its deadline passed, or the server's grace is over.
                if call.on_cancel is not None:
                    call.on_cancel()
                raise
        if call.status:
            await context.abort(_STATUS[call.status], call.text)
        return _join(call.answer)

    return behave


def _stream_behaviour(
    handle: Callable[[StreamCall], Awaitable[Any]],
) -> Callable[[AsyncIterator[bytes], Any], Awaitable[None]]:
    async def behave(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async def send(parts: Parts) -> None:
            await context.write(_join(parts))

        try:
            await handle(StreamCall(messages, send, _ContextMetadata(context), _deadline_ns(context)))
        except RpcError as error:
            await context.abort(_STATUS[error.status], error.message)

    return behave


def _join(parts: Parts) -> bytes:
    only = parts[0] if len(parts) == 1 else b"".join(parts)
    return only if isinstance(only, bytes) else bytes(only)


def _deadline_ns(context: grpc.aio.ServicerContext[bytes, bytes]) -> int | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic_ns() + int(remaining_s * 1e9)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_address(host: str, port: int, *, reuse_port: bool) -> None:
    """Bind once ourselves: grpcio would not tell why it cannot, and prints to stderr."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
    except OSError as error:
        raise _address_error(host, port, error.strerror or str(error)) from None


def _address_error(host: str, port: int, reason: str) -> ServerError:
    return UnavailableError(
        f"cannot listen for gRPC on {_authority(host, port)}: {reason}; "
        "choose another address with --grpc-address or another port with --grpc-port"
    )

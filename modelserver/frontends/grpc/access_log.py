"""gRPC calls on their way to the access log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modelserver.auth.access import Admitted
from modelserver.auth.api_keys import KeyRing
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.protocol.call import CheckHead, Metadata, Method, Parts, RpcError, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import STATUS_OF, Status
from modelserver.telemetry.access_log import ACCESS, AccessEntry, num_bytes

_METHOD = "POST"


def with_access_log(
    methods: Mapping[str, Method], *, is_logged: bool, keys: KeyRing | None = None
) -> Mapping[str, Method]:
    """The methods, with a log line for each of their calls if that is wanted.

    `keys` identify the caller of a call that another process answers, which checks the key itself.
    """
    return {path: _logged(path, method, keys) for path, method in methods.items()} if is_logged else methods


def _logged(path: str, method: Method, keys: KeyRing | None) -> Method:
    check_head = None if method.check_head is None else _logged_check(path, method.check_head)
    if method.unary is not None:
        return replace(method, unary=_logged_unary(path, method.unary, keys), check_head=check_head)
    assert method.stream is not None, "a method is one or the other"
    return replace(method, stream=_logged_stream(path, method.stream, keys), check_head=check_head)


def _logged_check(path: str, check: CheckHead) -> CheckHead:
    """A call that is refused by its head is logged, too."""

    def check_head(metadata: Metadata, peer: str) -> Admitted:
        entry = AccessEntry(
            "gRPC", _METHOD, path, peer=peer, num_bytes_in=0, trace_parent=str(metadata.get("traceparent", ""))
        )
        token = ACCESS.set(entry)
        try:
            return check(metadata, peer)
        except RpcError as error:
            entry.write(_name(error.status), 0)
            raise
        finally:
            ACCESS.reset(token)

    return check_head


def _find_caller(keys: KeyRing | None, call: UnaryCall | StreamCall) -> None:
    if keys is not None:
        with suppress(ServerError):
            keys.caller(call.metadata)


def _entry(path: str, call: UnaryCall | StreamCall, num_bytes_in: int) -> AccessEntry:
    return AccessEntry(
        "gRPC",
        _METHOD,
        path,
        peer=call.peer,
        num_bytes_in=num_bytes_in,
        trace_parent=str(call.metadata.get("traceparent", "")),
    )


def _logged_unary(path: str, handler: Callable[[UnaryCall], None], keys: KeyRing | None) -> Callable[[UnaryCall], None]:
    def handle(call: UnaryCall) -> None:
        entry = _entry(path, call, num_bytes(call.message))
        token = ACCESS.set(entry)
        try:
            _find_caller(keys, call)
            handler(_LoggedCall(call, entry))
        finally:
            ACCESS.reset(token)

    return handle


class _LoggedCall(UnaryCall):
    """A call whose answer is recorded."""

    __slots__ = ("_call", "_entry")

    def __init__(self, call: UnaryCall, entry: AccessEntry) -> None:
        self._call = call
        self._entry = entry
        self.message = call.message
        self.metadata = call.metadata
        self.deadline_ns = call.deadline_ns
        self.on_cancel = None
        call.on_cancel = self._cancel

    @property
    def peer(self) -> str:
        return self._call.peer

    def reply(self, parts: Parts) -> None:
        self._call.reply(parts)
        self._entry.write("OK", sum(map(num_bytes, parts)))

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        self._call.fail(status, text, retry_ms)
        self._entry.write(_name(status), 0)

    def _cancel(self) -> None:
        self._entry.write(Status.CANCELLED.name, 0)
        if self.on_cancel is not None:
            self.on_cancel()


def _logged_stream(
    path: str, handler: Callable[[StreamCall], Awaitable[Any]], keys: KeyRing | None
) -> Callable[[StreamCall], Awaitable[Any]]:
    async def handle(call: StreamCall) -> Any:
        entry = _entry(path, call, 0)
        num_bytes_out = 0

        async def messages() -> AsyncIterator[Buffer]:
            async for message in call.messages:
                entry.num_bytes_in += num_bytes(message)
                yield message

        async def send(parts: Parts) -> None:
            nonlocal num_bytes_out
            await call.send(parts)
            num_bytes_out += sum(map(num_bytes, parts))

        def send_now(parts: Parts) -> bool:
            nonlocal num_bytes_out
            assert call.send_now is not None, "asked of wires that have it"
            is_sent = call.send_now(parts)
            num_bytes_out += sum(map(num_bytes, parts)) if is_sent else 0
            return is_sent

        own = replace(call, messages=messages(), send=send, send_now=None if call.send_now is None else send_now)
        token = ACCESS.set(entry)
        status = Status.CANCELLED.name
        try:
            _find_caller(keys, call)
            result = await handler(own)
            status = Status.OK.name
        except RpcError as error:
            status = _name(error.status)
            raise
        except ServerError as error:
            status = STATUS_OF[error.code].name
            raise
        except Exception:
            status = Status.UNKNOWN.name
            raise
        finally:
            with suppress(ValueError):  # a task that is closed elsewhere has another context
                ACCESS.reset(token)
            entry.write(status, num_bytes_out)
        return result

    return handle


def _name(status: int) -> str:
    try:
        return Status(status).name
    except ValueError:
        return str(status)

"""The gRPC frontend: services behind one guard, which admits a call by its head before its handler sees it.

Knows no method of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelserver.auth.access import Admitted
from modelserver.auth.api_keys import CALLER
from modelserver.auth.guard import Guard, RestrictedError
from modelserver.errors import ServerError
from modelserver.frontends.grpc.access_log import with_access_log
from modelserver.frontends.grpc.edge import fail
from modelserver.protocol.call import Metadata, Method, RpcError, Service, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import Status, status_of
from modelserver.telemetry.audit import PEER


def guarded(path: str, method: Method, guard: Guard) -> Method:
    """The method, with the guard before it if the guard has rules. Tasks of the handler know the caller."""
    if guard.is_idle:
        return _knowing_peer(method) if method.needs.is_control else method
    unary, stream, needs = method.unary, method.stream, method.needs

    def check(call: UnaryCall) -> None:
        assert unary is not None, "a method is one or the other"
        peer = PEER.set(call.peer) if needs.is_control else None
        try:
            caller = CALLER.set(guard.admit(needs, call.metadata, path))
            try:
                unary(call)
            finally:
                CALLER.reset(caller)
        except RestrictedError as error:
            call.fail(*_restriction(error))
        except ServerError as error:
            fail(call, error)
        finally:
            if peer is not None:
                PEER.reset(peer)

    async def check_stream(call: StreamCall) -> None:
        assert stream is not None, "a method is one or the other"
        try:
            CALLER.set(guard.admit(needs, call.metadata, path))  # of the call's own Task
        except ServerError as error:
            raise _refusal(error) from None
        await stream(call)

    def check_head(metadata: Metadata, peer: str) -> Admitted:
        token = PEER.set(peer)
        try:
            return guard.admission(guard.admit(needs, metadata, path))
        except ServerError as error:
            raise _refusal(error) from None
        finally:
            PEER.reset(token)

    if unary is not None:
        return replace(method, unary=check, check_head=check_head)
    return replace(method, stream=check_stream, check_head=check_head)


def _knowing_peer(method: Method) -> Method:
    """A control method, whose calls the audit log records with their peers."""
    unary = method.unary
    assert unary is not None, "control methods are unary"

    def known(call: UnaryCall) -> None:
        token = PEER.set(call.peer)
        try:
            unary(call)
        finally:
            PEER.reset(token)

    return replace(method, unary=known)


def _refusal(error: ServerError) -> RpcError:
    return RpcError(*(_restriction(error) if isinstance(error, RestrictedError) else status_of(error)))


def _restriction(error: RestrictedError) -> tuple[int, str]:
    """In Triton's words."""
    return Status.UNAVAILABLE, f"This protocol is restricted, expecting header '{error.header}'"


class GrpcFrontend:
    """`methods` maps full method names to handlers. Everything runs on the event loop thread."""

    def __init__(self, services: Sequence[Service], guard: Guard, *, is_logged: bool = False) -> None:
        """`is_logged`: each call has a line in the access log."""
        self._services = tuple(services)
        methods = {
            path: guarded(path, method, guard)
            for service in services
            for name, method in service.methods.items()
            for path in (f"/{service.name}/{name}",)
        }
        self.methods: Mapping[str, Method] = with_access_log(methods, is_logged=is_logged)

    def drain(self) -> None:
        """Open streams soon take no more requests, and end when those in flight are answered. Called once."""
        for service in self._services:
            if service.drain is not None:
                service.drain()

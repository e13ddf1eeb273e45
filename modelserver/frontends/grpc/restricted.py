"""Methods that need a metadata key, by their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelserver.auth.access import EVERYBODY, Access, Admitted, Restriction
from modelserver.protocol.call import Metadata, Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import Status


def restricted(methods: Mapping[str, Method], access: Access) -> dict[str, Method]:
    """The methods, those of restricted groups with a guard before them."""
    guarded = {}
    for path, method in methods.items():
        restriction = access.restriction(method.needs)
        guarded[path] = method if restriction is None else _guarded(method, restriction)
    return guarded


def _guarded(method: Method, restriction: Restriction) -> Method:
    text = f"This protocol is restricted, expecting header '{restriction.key}'"
    unary, stream = method.unary, method.stream

    def check(call: UnaryCall) -> None:
        assert unary is not None, "a method is one or the other"
        if restriction.allows(call.metadata):
            unary(call)
        else:
            call.fail(Status.UNAVAILABLE, text)

    async def check_stream(call: StreamCall) -> None:
        assert stream is not None, "a method is one or the other"
        if not restriction.allows(call.metadata):
            raise RpcError(Status.UNAVAILABLE, text)
        await stream(call)

    def check_head(metadata: Metadata, _peer: str) -> Admitted:
        if not restriction.allows(metadata):
            raise RpcError(Status.UNAVAILABLE, text)
        return EVERYBODY

    if unary is not None:
        return replace(method, unary=check, check_head=check_head)
    return replace(method, stream=check_stream, check_head=check_head)

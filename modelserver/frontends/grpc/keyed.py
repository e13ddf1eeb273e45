"""gRPC where API keys are set: every method needs a key with a scope, but those of the server's health."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from modelserver.auth.access import KEY_HEADERS, WITHOUT_KEY, Admitted
from modelserver.auth.api_keys import CALLER, SCOPE_OF, ApiKey, KeyRing
from modelserver.auth.authorized_planes import check_scope, keyed_planes
from modelserver.errors import ServerError
from modelserver.frontends.grpc.edge import fail
from modelserver.frontends.grpc.servicer import GrpcFrontend
from modelserver.protocol.call import Metadata, Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import status_of
from modelserver.protocol.kserve import SERVICE
from modelserver.protocol.limits import GrpcLimits
from modelserver.telemetry.audit import PEER

if TYPE_CHECKING:
    from modelserver.planes.control import AnyControlPlane
    from modelserver.planes.data import AnyDataPlane

# What load balancers ask, who have no key. With a key, grpc.health.v1 tells of its models as well.
OPEN_METHODS: Final = frozenset({f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady"})
OPEN_UNLESS_KEYED: Final = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})


def grpc_frontend(
    dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: GrpcLimits, keys: KeyRing | None
) -> GrpcFrontend:
    """The frontend that these keys ask for; without any, nothing stands before a call."""
    if keys is None:
        return GrpcFrontend(dataplane, controlplane, limits)
    return KeyedGrpcFrontend(dataplane, controlplane, limits, keys)


class KeyedGrpcFrontend(GrpcFrontend):
    """Answers those who have a key for what they call."""

    def __init__(
        self, dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: GrpcLimits, keys: KeyRing
    ) -> None:
        self._keys = keys  # first: the methods are made in there
        super().__init__(*keyed_planes(dataplane, controlplane, keys), limits)

    def _guard(self, methods: Mapping[str, Method]) -> Mapping[str, Method]:
        return keyed(methods, self._keys)


def keyed(methods: Mapping[str, Method], keys: KeyRing) -> dict[str, Method]:
    """The methods with a guard before each that needs one."""
    return {
        path: _open(method) if path in OPEN_METHODS else _guarded(path, method, keys)
        for path, method in methods.items()
    }


def _guarded(path: str, method: Method, keys: KeyRing) -> Method:
    unary, stream = method.unary, method.stream
    scope = SCOPE_OF[method.needs]
    is_optional = path in OPEN_UNLESS_KEYED
    check_other = method.check_head

    def caller_of(metadata: Metadata) -> ApiKey | None:
        if is_optional and all(metadata.get(name) is None for name in KEY_HEADERS):
            return None
        caller = keys.caller(metadata)
        check_scope(caller, scope, path)
        return caller

    def check_head(metadata: Metadata, peer: str) -> Admitted:
        token = PEER.set(peer)
        try:
            caller = caller_of(metadata)
        except ServerError as error:
            raise RpcError(*status_of(error)) from None
        finally:
            PEER.reset(token)
        if check_other is not None:
            check_other(metadata, peer)
        return WITHOUT_KEY if caller is None else Admitted(caller.name)

    def check(call: UnaryCall) -> None:
        assert unary is not None, "a method is one or the other"
        try:
            caller = caller_of(call.metadata)
        except ServerError as error:
            fail(call, error)
            return
        token = CALLER.set(caller)
        try:
            unary(call)
        finally:
            CALLER.reset(token)

    async def check_stream(call: StreamCall) -> None:
        assert stream is not None, "a method is one or the other"
        try:
            caller = caller_of(call.metadata)
        except ServerError as error:
            raise RpcError(*status_of(error)) from None
        CALLER.set(caller)  # of the call's own Task
        await stream(call)

    if unary is not None:
        return replace(method, unary=check, check_head=check_head)
    return replace(method, stream=check_stream, check_head=check_head)


def _open(method: Method) -> Method:
    """The method of load balancers, whose messages are next to empty."""
    return replace(method, check_head=lambda _metadata, _peer: WITHOUT_KEY)

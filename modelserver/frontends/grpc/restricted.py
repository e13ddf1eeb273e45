"""Which group of calls each method belongs to, and methods that need a metadata key."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.access import Access, ApiGroup, Restriction
from modelserver.frontends.grpc.call import Method, RpcError, StreamCall, UnaryCall
from modelserver.frontends.grpc.status import Status

# By the end of a method's path; the first that fits.
_GROUPS = (
    ("/ServerLive", ApiGroup.HEALTH),
    ("/ServerReady", ApiGroup.HEALTH),
    ("/ModelReady", ApiGroup.HEALTH),
    ("/ServerMetadata", ApiGroup.METADATA),
    ("/ModelMetadata", ApiGroup.METADATA),
    ("/ModelConfig", ApiGroup.MODEL_CONFIG),
    ("/ModelStatistics", ApiGroup.STATISTICS),
    ("/ModelInfer", ApiGroup.INFERENCE),
    ("/ModelStreamInfer", ApiGroup.INFERENCE),
    ("/RepositoryIndex", ApiGroup.MODEL_REPOSITORY),
    ("/RepositoryModelLoad", ApiGroup.MODEL_REPOSITORY),
    ("/RepositoryModelUnload", ApiGroup.MODEL_REPOSITORY),
    ("/RepositoryModelTraffic", ApiGroup.MODEL_REPOSITORY),
    ("SharedMemoryStatus", ApiGroup.SHARED_MEMORY),
    ("SharedMemoryRegister", ApiGroup.SHARED_MEMORY),
    ("SharedMemoryUnregister", ApiGroup.SHARED_MEMORY),
    ("/TraceSetting", ApiGroup.TRACE),
    ("/LogSettings", ApiGroup.LOGGING),
    ("/ServerReflectionInfo", ApiGroup.METADATA),
)


def group_of(path: str) -> ApiGroup:
    """The group of a method. Every method has one: a new one without is our own mistake, found at the start."""
    if path.startswith("/grpc.health."):
        return ApiGroup.HEALTH
    return next(group for end, group in _GROUPS if path.endswith(end))


def restricted(methods: Mapping[str, Method], access: Access) -> dict[str, Method]:
    """The methods, those of restricted groups with a guard before them."""
    guarded = {}
    for path, method in methods.items():
        restriction = access.restriction(group_of(path))
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

    return Method(unary=check) if unary is not None else Method(stream=check_stream)

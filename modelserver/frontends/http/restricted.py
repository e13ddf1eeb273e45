"""Which group of calls each route belongs to, and routes that need a header."""

from __future__ import annotations

from collections.abc import Iterable

from modelserver.access import Access, ApiGroup, Restriction
from modelserver.frontends.http.exchange import HttpExchange
from modelserver.frontends.http.router import Route, RouteCall
from modelserver.frontends.http.status import message_response

# The first that a pattern begins with, and its last segment if one is given.
_BY_START = (
    ("/v2/health/", ApiGroup.HEALTH),
    ("/v2/repository/", ApiGroup.MODEL_REPOSITORY),
    ("/v2/systemsharedmemory/", ApiGroup.SHARED_MEMORY),
    ("/v2/cudasharedmemory/", ApiGroup.SHARED_MEMORY),
    ("/v2/trace/", ApiGroup.TRACE),
    ("/v2/logging", ApiGroup.LOGGING),
    ("/v1/models/{id}/", ApiGroup.MODEL_REPOSITORY),  # load and unload
    ("/v1/models", ApiGroup.METADATA),
    ("/v1/", ApiGroup.INFERENCE),
)
_BY_END = {
    "infer": ApiGroup.INFERENCE,
    "generate": ApiGroup.INFERENCE,
    "generate_stream": ApiGroup.INFERENCE,
    "ready": ApiGroup.HEALTH,
    "config": ApiGroup.MODEL_CONFIG,
    "stats": ApiGroup.STATISTICS,
    "overview": ApiGroup.STATISTICS,
    "metrics": ApiGroup.STATISTICS,
    "reset": ApiGroup.MODEL_REPOSITORY,  # it changes what everybody sees
    "setting": ApiGroup.TRACE,
    "models": ApiGroup.METADATA,
    "v2": ApiGroup.METADATA,
    "{name}": ApiGroup.METADATA,
    "{version}": ApiGroup.METADATA,
    "tokenize": ApiGroup.INFERENCE,
    "detokenize": ApiGroup.INFERENCE,
    "health": ApiGroup.HEALTH,
    "ping": ApiGroup.HEALTH,
    "version": ApiGroup.METADATA,
}


def group_of(pattern: str) -> ApiGroup:
    """The group of a route. Every route has one: a new one without is our own mistake, found at the start."""
    for start, group in _BY_START:
        if pattern.startswith(start):
            return group
    return _BY_END[pattern.rsplit("/", 1)[1]]


def restricted(routes: Iterable[Route], access: Access) -> tuple[Route, ...]:
    """The routes, those of restricted groups with a guard before them."""
    found: list[Route] = []
    for route in routes:
        found += guarded((route,), access.restriction(group_of(route.pattern)))
    return tuple(found)


def guarded(routes: Iterable[Route], restriction: Restriction | None) -> tuple[Route, ...]:
    """The routes, with a guard before each if there is a restriction."""
    if restriction is None:
        return tuple(routes)
    return tuple(Route(route.method, route.pattern, _guarded(route.call, restriction)) for route in routes)


def _guarded(call: RouteCall, restriction: Restriction) -> RouteCall:
    def check(exchange: HttpExchange, **arguments: str) -> None:
        if restriction.allows(exchange.head.headers):
            call(exchange, **arguments)
        else:
            exchange.respond(message_response(403, f"This API is restricted, expecting header '{restriction.key}'"))

    return check

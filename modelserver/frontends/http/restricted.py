"""Routes that need a header, by their groups."""

from __future__ import annotations

from dataclasses import replace

from modelserver.auth.access import Access, Restriction
from modelserver.frontends.http.router import Api, Route, RouteCall
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import ErrorWriter


def restricted(api: Api, access: Access) -> Api:
    """The API, its routes of restricted groups with a guard before them."""
    return replace(
        api, routes=tuple(_restricted(route, access.restriction(route.group), api.errors) for route in api.routes)
    )


def _restricted(route: Route, restriction: Restriction | None, errors: ErrorWriter) -> Route:
    return route if restriction is None else route.calling(_guarded(route.call, restriction, errors))


def _guarded(call: RouteCall, restriction: Restriction, errors: ErrorWriter) -> RouteCall:
    def check(exchange: HttpExchange, **arguments: str) -> None:
        if restriction.allows(exchange.head.headers):
            call(exchange, **arguments)
        else:
            exchange.respond(errors.restricted(restriction.key))

    return check

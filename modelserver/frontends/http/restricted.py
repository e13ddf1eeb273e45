"""Routes that need a header, by their groups."""

from __future__ import annotations

from collections.abc import Iterable

from modelserver.auth.access import Access, Restriction
from modelserver.frontends.http.exchange import HttpExchange
from modelserver.frontends.http.router import Route, RouteCall
from modelserver.frontends.http.status import message_response


def restricted(routes: Iterable[Route], access: Access) -> tuple[Route, ...]:
    """The routes, those of restricted groups with a guard before them."""
    return tuple(_restricted(route, access.restriction(route.group)) for route in routes)


def _restricted(route: Route, restriction: Restriction | None) -> Route:
    return route if restriction is None else route.calling(_guarded(route.call, restriction))


def _guarded(call: RouteCall, restriction: Restriction) -> RouteCall:
    def check(exchange: HttpExchange, **arguments: str) -> None:
        if restriction.allows(exchange.head.headers):
            call(exchange, **arguments)
        else:
            exchange.respond(message_response(403, f"This API is restricted, expecting header '{restriction.key}'"))

    return check

"""Routes whose calls the audit log has: it is told where they come from."""

from __future__ import annotations

from modelserver.auth.api_keys import SCOPE_OF, Scope
from modelserver.frontends.http.router import Route, RouteCall
from modelserver.protocol.exchange import HttpExchange
from modelserver.telemetry.audit import PEER


def with_peer(route: Route) -> Route:
    """The route; if it is one of control, its calls know where they come from."""
    if SCOPE_OF[route.group] is not Scope.ADMIN:
        return route
    return route.calling(knowing_peer(route.call))


def knowing_peer(call: RouteCall) -> RouteCall:
    """The call, with what it starts knowing where the request comes from."""

    def known(exchange: HttpExchange, **arguments: str) -> None:
        token = PEER.set(exchange.peer)
        try:
            call(exchange, **arguments)
        finally:
            PEER.reset(token)

    return known

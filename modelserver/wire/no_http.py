"""In place of the HTTP frontend on a port that serves gRPC only."""

from __future__ import annotations

from modelserver.frontends.http.exchange import Frontend, HttpExchange
from modelserver.frontends.http.status import message_response


class NoHttp(Frontend):
    """Tells whoever asks by HTTP where to ask."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer 404."""
        exchange.respond(message_response(404, "this port serves gRPC and no HTTP: see --http-port and --shared-ports"))

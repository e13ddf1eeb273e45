"""In place of the HTTP frontend on a port that serves gRPC only."""

from __future__ import annotations

from modelserver.protocol.exchange import Frontend, HttpExchange
from modelserver.protocol.response import message_response


class NoHttp(Frontend):
    """Tells HTTP clients which port to use."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer 404."""
        exchange.respond(message_response(404, "this port serves gRPC and no HTTP: see --http-port and --shared-ports"))

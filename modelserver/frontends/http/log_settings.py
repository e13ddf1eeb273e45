"""`/v2/logging`: what is logged, and how."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from modelserver.frontends.http.exchange import HttpExchange
from modelserver.frontends.http.json_body import with_object
from modelserver.frontends.http.limits import HttpLimits
from modelserver.frontends.http.router import Route
from modelserver.frontends.http.status import json_response

if TYPE_CHECKING:
    from modelserver.controlplane import ControlPlane


class LogRoutes:
    """Answers the logging extension. Called from the event loop thread."""

    def __init__(self, controlplane: ControlPlane, limits: HttpLimits) -> None:
        self._controlplane = controlplane
        self._limits = limits

    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", "/v2/logging", self.read), Route("POST", "/v2/logging", self.update))

    def read(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response(asdict(self._controlplane.logs.settings)))

    def update(self, exchange: HttpExchange) -> None:
        """The body names the settings that shall change; the answer has all of them."""

        def answer(document: dict[str, Any]) -> None:
            exchange.respond(json_response(asdict(self._controlplane.logs.update(document))))

        with_object(exchange, self._limits, answer)

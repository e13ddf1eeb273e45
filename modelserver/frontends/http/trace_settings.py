"""`/v2/trace/setting` and `/v2/models/{name}/trace/setting`: which requests are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelserver.auth.access import ApiGroup
from modelserver.core.documents import beginning
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.json_body import with_object
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import json_response

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane


class TraceRoutes:
    """Answers the trace extension. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def routes(self) -> tuple[Route, ...]:
        return tuple(
            Route(method, pattern, call, ApiGroup.TRACE)
            for pattern in ("/v2/trace/setting", "/v2/models/{name}/trace/setting")
            for method, call in (("GET", self.read), ("POST", self.update))
        )

    def read(self, exchange: HttpExchange, name: str = "") -> None:
        exchange.respond(json_response(self._dataplane.trace_settings(name)))

    def update(self, exchange: HttpExchange, name: str = "") -> None:
        """The body names the settings to change, with null for those to unset; the answer has all."""

        def answer(document: dict[str, Any]) -> None:
            for setting, value in document.items():
                _check(setting, value)
            exchange.respond(json_response(self._dataplane.update_trace_settings(document, name)))

        with_object(exchange, self._limits, answer)


def _check(setting: str, value: Any) -> None:
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    if value is not None and not isinstance(value, str) and not is_list:
        raise InvalidArgumentError(
            f"trace setting '{setting:.100}' must be a string, an array of strings or null, got {beginning(value, 40)}"
        )

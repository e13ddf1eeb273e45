"""The metrics endpoint: one path, in the format that the scraper asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client.core import Metric

from modelserver.auth.access import ApiGroup
from modelserver.core.long_work import Slices, long_work
from modelserver.errors import ServerError
from modelserver.frontends.http.body import answer_errors
from modelserver.protocol.api import Api, Route, RouteSchema
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import STATUS, ErrorWriter, HttpResponse, error_response
from modelserver.telemetry.exposition import (
    OPENMETRICS_CONTENT_TYPE,
    TEXT_CONTENT_TYPE,
    accepts_openmetrics,
    openmetrics_slices,
    text_slices,
)

PATH = "/metrics"


class Metrics:
    """Serves the page that `collect` makes: its first slice on the event loop, the others beside it."""

    def __init__(self, collect: Callable[[], Slices[Sequence[Metric]]]) -> None:
        self._collect = collect

    def api(self, port: int | None = None) -> Api:
        """The one route. Errors are lines of text, as scrapers show them."""
        route = Route("GET", PATH, self.answer, ApiGroup.STATISTICS)
        schemas = {f"GET {PATH}": RouteSchema(answer="string", media_type="text/plain")}
        return Api("metrics", (route,), TextErrors(), port=port).described(schemas, {})

    def answer(self, exchange: HttpExchange) -> None:
        """All metrics."""
        is_open = accepts_openmetrics(exchange.head.headers.get("accept", ""))
        headers = [("Content-Type", OPENMETRICS_CONTENT_TYPE if is_open else TEXT_CONTENT_TYPE)]
        slices = self._collect()
        next(slices)
        exchange.on_disconnect = long_work().start(
            _page(slices, openmetrics_slices if is_open else text_slices),
            partial(answer_errors, exchange, lambda page: exchange.respond(HttpResponse(200, headers, (page,)))),
        )


def _page(collect: Slices[Sequence[Metric]], render: Callable[[Iterable[Metric]], Slices[bytes]]) -> Slices[bytes]:
    return (yield from render((yield from collect)))


class TextErrors(ErrorWriter):
    """A line of text."""

    def failed(self, error: Exception) -> HttpResponse:
        if isinstance(error, ServerError):
            return self.refused(STATUS[error.code], error.message)
        return error_response(error)

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:  # noqa: ARG002 # no codes here
        body = message.encode(errors="replace") + b"\n"
        return HttpResponse(status, [("Content-Type", "text/plain; charset=utf-8")], (body,))

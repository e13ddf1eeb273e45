"""The metrics: all of them, in the format that the scraper asks for, and the load alone, for endpoint pickers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import parse_qs

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
from modelserver.telemetry.load_page import LoadPage

PATH = "/metrics"
LOAD_PATH = "/metrics/load"
_LOAD_HEADERS = [("Content-Type", TEXT_CONTENT_TYPE)]
_QUERY = {"type": "object", "properties": {"model": {"type": "string"}}}


class Metrics:
    """Serves the page that `collect` makes: its first slice on the event loop, the others beside it."""

    def __init__(self, collect: Callable[[], Slices[Sequence[Metric]]], load: LoadPage | None = None) -> None:
        """`load` is absent in a router, which has no models: then the route of its page is, too."""
        self._collect = collect
        self._load = load

    def api(self, port: int | None = None) -> Api:
        """Errors are lines of text, as scrapers show them."""
        routes = [Route("GET", PATH, self.answer, ApiGroup.STATISTICS)]
        if self._load is not None:
            routes.append(Route("GET", LOAD_PATH, self.answer_load, ApiGroup.STATISTICS))
        text = RouteSchema(answer="string", media_type="text/plain")
        schemas = {f"GET {PATH}": text, f"GET {LOAD_PATH}": replace(text, query=_QUERY)}
        schemas = {call: schemas[call] for call in (f"{route.method} {route.pattern}" for route in routes)}
        return Api("metrics", tuple(routes), TextErrors(), port=port).described(schemas, {})

    def answer_load(self, exchange: HttpExchange) -> None:
        """The load: requests that wait and that run, of all models or of one."""
        assert self._load is not None, "there is a route of it"
        query = exchange.head.query
        name = parse_qs(query).get("model", [""])[-1] if query else ""
        exchange.respond(HttpResponse(200, _LOAD_HEADERS, (self._load.text(name),)))

    def answer(self, exchange: HttpExchange) -> None:
        """All metrics."""
        is_open = accepts_openmetrics(exchange.head.headers.get("accept", ""))
        headers = [("Content-Type", OPENMETRICS_CONTENT_TYPE if is_open else TEXT_CONTENT_TYPE)]
        slices = self._collect()
        next(slices)
        exchange.on_disconnect = long_work().start(
            _page(slices, openmetrics_slices if is_open else text_slices),
            partial(answer_errors, exchange, lambda page: exchange.respond(HttpResponse(200, headers, page))),
        )


def _page(
    collect: Slices[Sequence[Metric]], render: Callable[[Iterable[Metric]], Slices[tuple[bytes, ...]]]
) -> Slices[tuple[bytes, ...]]:
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

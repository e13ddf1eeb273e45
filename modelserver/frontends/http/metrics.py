"""The metrics endpoint: one path, in the format that the scraper asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client.core import Metric

from modelserver.frontends.http.exchange import Frontend, HttpExchange, HttpResponse
from modelserver.telemetry.exposition import (
    OPENMETRICS_CONTENT_TYPE,
    TEXT_CONTENT_TYPE,
    accepts_openmetrics,
    render_openmetrics,
    render_text,
)

PATH = "/metrics"


class MetricsFrontend(Frontend):
    """Serves what `collect` makes; called on the event loop thread."""

    def __init__(self, collect: Callable[[], Sequence[Metric]]) -> None:
        self._collect = collect

    def handle(self, exchange: HttpExchange) -> None:
        """Answer one request: the metrics, or 404 or 405 with what to ask instead."""
        head = exchange.head
        if head.path.rstrip("/") != PATH:
            exchange.respond(_plain(404, f"nothing at '{head.path}' on the metrics port; metrics are at {PATH}\n"))
        elif head.method not in ("GET", "HEAD"):
            exchange.respond(_plain(405, f"{PATH} answers GET, not {head.method}\n", [("Allow", "GET, HEAD")]))
        elif accepts_openmetrics(head.headers.get("accept", "")):
            body = render_openmetrics(self._collect())
            exchange.respond(HttpResponse(200, [("Content-Type", OPENMETRICS_CONTENT_TYPE)], (body,)))
        else:
            exchange.respond(HttpResponse(200, [("Content-Type", TEXT_CONTENT_TYPE)], (render_text(self._collect()),)))


def _plain(status: int, text: str, headers: Sequence[tuple[str, str]] = ()) -> HttpResponse:
    return HttpResponse(status, [("Content-Type", "text/plain; charset=utf-8"), *headers], (text.encode(),))

"""The metrics endpoint: one path, in the format that the scraper asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client.core import Metric

from modelserver.core.long_work import Slices, long_work
from modelserver.frontends.http.body import answer_errors
from modelserver.protocol.exchange import Frontend, HttpExchange, HttpResponse
from modelserver.telemetry.exposition import (
    OPENMETRICS_CONTENT_TYPE,
    TEXT_CONTENT_TYPE,
    accepts_openmetrics,
    openmetrics_slices,
    text_slices,
)

PATH = "/metrics"


class MetricsFrontend(Frontend):
    """Serves what `collect` makes: its first slice on the event loop, the others beside it."""

    def __init__(self, collect: Callable[[], Slices[Sequence[Metric]]]) -> None:
        self._collect = collect

    def handle(self, exchange: HttpExchange) -> None:
        """Answer one request: the metrics, or 404 or 405 with what to ask instead."""
        head = exchange.head
        if head.path.rstrip("/") != PATH:
            exchange.respond(_plain(404, f"nothing at '{head.path}' on the metrics port; metrics are at {PATH}\n"))
        elif head.method not in ("GET", "HEAD"):
            exchange.respond(_plain(405, f"{PATH} answers GET, not {head.method}\n", [("Allow", "GET, HEAD")]))
        else:
            is_open = accepts_openmetrics(head.headers.get("accept", ""))
            headers = [("Content-Type", OPENMETRICS_CONTENT_TYPE if is_open else TEXT_CONTENT_TYPE)]
            slices = self._collect()
            next(slices)
            exchange.on_disconnect = long_work().start(
                _page(slices, openmetrics_slices if is_open else text_slices),
                partial(answer_errors, exchange, lambda page: exchange.respond(HttpResponse(200, headers, (page,)))),
            )


def _page(collect: Slices[Sequence[Metric]], render: Callable[[Iterable[Metric]], Slices[bytes]]) -> Slices[bytes]:
    return (yield from render((yield from collect)))


def _plain(status: int, text: str, headers: Sequence[tuple[str, str]] = ()) -> HttpResponse:
    return HttpResponse(status, [("Content-Type", "text/plain; charset=utf-8"), *headers], (text.encode(),))

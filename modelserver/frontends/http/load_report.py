"""The load of a model, in a header of its answers, for load balancers that use it (ORCA).

A client asks for it by `endpoint-load-metrics-format: text` or `json`. Named metrics are the requests in flight and
those waiting; `application_utilization` is requests in flight per instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from modelserver.errors import ServerError
from modelserver.frontends.http.relayed import RelayedExchange
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.kserve import ASKING_HEADER

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane, ModelLoad

_HEADER = "endpoint-load-metrics"


def reporting(exchange: HttpExchange, dataplane: AnyDataPlane, name: str, version: int | None) -> HttpExchange:
    """`exchange`, or one whose answer has the header, if the client asks for it in a known format."""
    wanted = exchange.head.headers.get(ASKING_HEADER, "").strip().lower()
    if wanted not in ("text", "json"):
        return exchange
    return _ReportingExchange(exchange, dataplane, name, version, is_json=wanted == "json")


class _ReportingExchange(RelayedExchange):
    __slots__ = ("_dataplane", "_is_json", "_name", "_version")

    def __init__(
        self, exchange: HttpExchange, dataplane: AnyDataPlane, name: str, version: int | None, *, is_json: bool
    ) -> None:
        super().__init__(exchange)
        self._dataplane = dataplane
        self._name = name
        self._version = version
        self._is_json = is_json

    def change(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        try:
            load = self._dataplane.load_of(self._name, self._version)
        except ServerError:
            return headers  # unknown model, as the answer says
        return [*headers, (_HEADER, _as_json(load) if self._is_json else _as_text(load))]


def _as_text(load: ModelLoad) -> str:
    return (
        f"TEXT application_utilization={load.utilization:.4g}, named_metrics.inflight={load.num_inflight}, "
        f"named_metrics.queue_depth={load.queue_depth}"
    )


def _as_json(load: ModelLoad) -> str:
    named = {"inflight": load.num_inflight, "queue_depth": load.queue_depth}
    document = {"application_utilization": round(load.utilization, 4), "named_metrics": named}
    return "JSON " + orjson.dumps(document).decode()

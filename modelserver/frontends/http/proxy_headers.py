"""Headers of proxies and load balancers: how long the client waits, and how busy a model is (ORCA).

Envoy and its derivatives tell servers when they will give up (its documentation of HTTP headers). A client asks for the
load of a model, in a header of its answers, by `endpoint-load-metrics-format: text` or `json`. Named metrics are the
requests in flight and those waiting; `application_utilization` is requests in flight per instance.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import orjson

from modelserver.auth.access import Access
from modelserver.core.request import LOWEST_PRIORITY, InFlightRequest
from modelserver.errors import ServerError
from modelserver.frontends.http.relayed import RelayedExchange
from modelserver.planes.authorized import AnyDataPlane
from modelserver.planes.data import ModelLoad
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.kserve import ASKING_HEADER, HOPS, TIMEOUT_HEADER

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


def _named(load: ModelLoad) -> dict[str, float]:
    named: dict[str, float] = {"inflight": load.num_inflight, "queue_depth": load.queue_depth}
    if load.kv_cache_utilization is not None and load.max_token_capacity is not None:
        # The names are Triton's for language models.
        named["kv_cache_utilization"] = round(load.kv_cache_utilization, 4)
        named["max_token_capacity"] = load.max_token_capacity
    return named


def _as_text(load: ModelLoad) -> str:
    named = (f"named_metrics.{name}={value}" for name, value in _named(load).items())
    return ", ".join((f"TEXT application_utilization={load.utilization:.4g}", *named))


def _as_json(load: ModelLoad) -> str:
    document = {"application_utilization": round(load.utilization, 4), "named_metrics": _named(load)}
    return "JSON " + orjson.dumps(document).decode()


_MAX_DIGITS: Final = 12
_NS_PER_MS: Final = 1_000_000


def client_timeout_ns(headers: Mapping[str, str]) -> int:
    """The time from now on in which an answer is useful; 0: no limit, also if the header is not a number."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > _MAX_DIGITS:
        return 0
    return int(text) * _NS_PER_MS


def adopt(request: InFlightRequest, exchange: HttpExchange, access: Access) -> InFlightRequest:
    """Pass on what a call's headers say: forwarded headers, trace, deadline, caller, objective.

    Returns the request. Raises InvalidArgumentError as `Access` does.
    """
    head = exchange.head
    forwarded = access.forwarded(head.headers, head.names)
    if forwarded is not None:
        request.forward(forwarded)
    hops = head.headers.get(HOPS)
    if hops is not None:
        request.forward({HOPS: hops})
    context = access.context(head.headers)
    if context:
        request.join_trace(context)
    timeout_ns = client_timeout_ns(head.headers)
    if timeout_ns:
        request.deadline_ns = time.monotonic_ns() + timeout_ns
    if exchange.is_background:
        request.priority = LOWEST_PRIORITY
    elif access.objectives and not request.priority:
        request.priority = access.priority(head.headers)
    if access.callers_by:
        request.caller = access.caller(head.headers, exchange.peer)
    return request

"""Traces as OpenTelemetry spans, sent to a collector by OTLP over HTTP, in its JSON encoding.

A request's span holds one of its model, which holds those of its phases (queue, compute; prefill and decode of language
models), and those of the models that it called.
"""

from __future__ import annotations

import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import orjson

from modelserver.core.trace import Trace
from modelserver.telemetry.trace_settings import TraceOptions

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_SERVER, _INTERNAL = 2, 1  # kinds of span
_COMPLETE = "INFER_RESPONSE_COMPLETE"
# Phases with their own span, and the events that delimit them.
_PHASES = (
    ("queue", "QUEUE_START", "COMPUTE_START"),
    ("prefill", "PREFILL_START", "FIRST_TOKEN"),
    ("decode", "FIRST_TOKEN", "LAST_TOKEN"),
)


class TraceCollector:
    """The collector that the options name. Called from one thread."""

    def __init__(self, options: TraceOptions, version: str) -> None:
        url = options.url
        self._url = url if "://" in url else f"http://{url}"
        self._most_spans = options.bsp_max_export_batch_size
        self._resource = [_attribute(key, value) for key, value in options.resource.items()]
        self._scope = {"name": "modelserver", "version": version}
        # From the monotonic clock to wall-clock time.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def send(self, traces: list[Trace]) -> None:
        """Blocking, in messages of at most `bsp_max_export_batch_size` spans.

        Spans that the collector does not accept are lost, which is logged.
        """
        spans = [span for trace in traces for span in self._spans(trace)]
        for start in range(0, len(spans), self._most_spans):
            self._post(spans[start : start + self._most_spans])

    def _post(self, spans: list[dict[str, Any]]) -> None:
        scope = {"scope": self._scope, "spans": spans}
        document = {"resourceSpans": [{"resource": {"attributes": self._resource}, "scopeSpans": [scope]}]}
        if urllib.parse.urlsplit(self._url).scheme not in ("http", "https"):
            logger.error("%d spans are lost: '%s' is not the HTTP address of a collector", len(spans), self._url)
            return
        request = urllib.request.Request(  # noqa: S310 - the scheme was looked at
            self._url, orjson.dumps(document), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - as above
                answer.read()
        except (OSError, urllib.error.URLError, ValueError) as error:
            logger.error("%d spans are lost: the collector at '%s' did not take them: %s", len(spans), self._url, error)

    def _spans(self, trace: Trace) -> list[dict[str, Any]]:
        if not trace.events:
            return []
        trace_id = trace.trace_id
        times = dict(trace.events)
        first, last = min(times.values()), max(times.values())
        model = self._span(
            trace_id,
            trace.parent_span,
            trace.model_name,
            _INTERNAL,
            times.get("REQUEST_START", first),
            times.get("REQUEST_END", last),
        )
        model["spanId"] = trace.span_id
        request = model
        spans = [span for child in trace.children for span in self._spans(child)]
        if trace.caller is None:
            request = self._span(trace_id, trace.parent_span, "InferRequest", _SERVER, first, last)
            model["parentSpanId"] = request["spanId"]
            spans.append(request)
        model["attributes"] = [
            _attribute("triton.model_name", trace.model_name),
            _attribute("triton.model_version", str(trace.version)),
            _attribute("triton.trace_request_id", trace.request_id),
        ]
        spans.append(model)
        for name, start, end in _PHASES:
            if start in times and end in times:
                span = self._span(trace_id, model["spanId"], name, _INTERNAL, times[start], times[end])
                spans.append(span)
        compute = [time_ns for name, time_ns in trace.events if name.startswith("COMPUTE_")]
        inside: dict[str, Any] | None = None
        if compute:
            inside = self._span(trace_id, model["spanId"], "compute", _INTERNAL, min(compute), max(compute))
            spans.append(inside)
        for name, time_ns in trace.events:
            span = inside if inside is not None and name.startswith("COMPUTE_") else model
            if name == _COMPLETE and trace.caller is not None:
                continue  # the caller's request goes on, and its span has an event of this name
            if name == _COMPLETE or name.startswith(("HTTP_", "GRPC_")):
                span = request
            span["events"].append({"name": name, "timeUnixNano": str(time_ns + self._offset_ns)})
        return spans

    def _span(self, trace_id: str, parent_id: str, name: str, kind: int, start_ns: int, end_ns: int) -> dict[str, Any]:
        span: dict[str, Any] = {
            "traceId": trace_id,
            "spanId": os.urandom(8).hex(),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(start_ns + self._offset_ns),
            "endTimeUnixNano": str(end_ns + self._offset_ns),
            "events": [],
        }
        if parent_id:
            span["parentSpanId"] = parent_id
        return span


def parse_context(traceparent: str) -> tuple[str, str] | None:
    """Trace id and span id of a W3C `traceparent`; None if it is invalid (W3C Trace Context, section 3.2)."""
    parts = traceparent.strip().lower().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    if any(set(part) - set("0123456789abcdef") for part in parts[:4]) or not int(parts[1], 16) or not int(parts[2], 16):
        return None
    return parts[1], parts[2]


def _attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}

"""Traces, metrics and logs for OpenTelemetry, by its own SDK (the extra `otel`): OTLP over gRPC or HTTP.

The SDK's exporters read the variables `OTEL_EXPORTER_OTLP_*` by themselves: headers, certificates, timeouts.
Sources: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables and W3C Trace Context.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from modelserver.core.long_work import finish
from modelserver.core.trace import Trace
from modelserver.errors import InvalidArgumentError, UnavailableError
from modelserver.telemetry.exposition import text_slices
from modelserver.telemetry.trace_settings import GRPC, TraceOptions

logger = logging.getLogger(__name__)

_SERVER, _INTERNAL = "SERVER", "INTERNAL"  # kinds of span
_COMPLETE = "INFER_RESPONSE_COMPLETE"
# Phases with their own span, and the events that delimit them.
_PHASES = (
    ("queue", "QUEUE_START", "COMPUTE_START"),
    ("prefill", "PREFILL_START", "FIRST_TOKEN"),
    ("decode", "FIRST_TOKEN", "LAST_TOKEN"),
)
_ROOT_LOGGER = "modelserver"
_INTERVAL_VARIABLE, _DEFAULT_INTERVAL_MS = "OTEL_METRIC_EXPORT_INTERVAL", 60_000


def _sdk(module: str) -> Any:
    """A module of OpenTelemetry. Raises UnavailableError with the extra that brings it."""
    try:
        return importlib.import_module(f"opentelemetry.{module}")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"OpenTelemetry needs the Python package '{error.name}', which is not installed: "
            "pip install 'modelserver-py[otel]'"
        ) from error


def _exporter(signal: str, name: str, protocol: str, **settings: Any) -> Any:
    """The SDK's exporter of a signal. Raises UnavailableError without the extra."""
    kind = "grpc" if protocol == GRPC else "http"
    return getattr(_sdk(f"exporter.otlp.proto.{kind}.{signal}"), name)(**settings)


def check_installed() -> None:
    """Raise UnavailableError if the SDK or an exporter is missing."""
    for module in ("sdk.trace", "exporter.otlp.proto.http.trace_exporter", "exporter.otlp.proto.grpc.trace_exporter"):
        _sdk(module)


class TraceCollector:
    """The collector that the options name. Called from one thread.

    A request's span holds one of its model, which holds those of its phases (queue, compute; prefill and decode of
    language models), and those of the models that it called. Raises UnavailableError without the extra.
    """

    def __init__(self, options: TraceOptions, version: str) -> None:
        url = options.url
        self._url = url if "://" in url else f"http://{url}"
        self._most_spans = options.bsp_max_export_batch_size
        self._api, self._trace = _sdk("trace"), _sdk("sdk.trace")
        self._resource = _sdk("sdk.resources").Resource.create(dict(options.resource))
        self._scope = _sdk("sdk.util.instrumentation").InstrumentationScope(_ROOT_LOGGER, version)
        self._exporter = _exporter("trace_exporter", "OTLPSpanExporter", options.protocol, endpoint=self._url)
        self._success = _sdk("sdk.trace.export").SpanExportResult.SUCCESS
        self._ids = _sdk("sdk.trace.id_generator").RandomIdGenerator()
        # From the monotonic clock to wall-clock time.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def send(self, traces: list[Trace]) -> None:
        """Blocking, in messages of at most `bsp_max_export_batch_size` spans.

        Spans that the collector does not accept are lost, which is logged.
        """
        spans = [span for trace in traces for span in self._spans(trace)]
        for start in range(0, len(spans), self._most_spans):
            part = spans[start : start + self._most_spans]
            try:
                is_taken = self._exporter.export(part) is self._success
            except Exception as error:  # an address that is none makes the SDK raise anything
                logger.debug("the exporter of spans failed: %r", error)
                is_taken = False
            if not is_taken:
                logger.error("%d spans are lost: the collector at '%s' did not take them", len(part), self._url)

    def close(self) -> None:
        """Give up the message that is on its way, and take no more. From any thread."""
        self._exporter.shutdown()

    def _spans(self, trace: Trace) -> list[Any]:
        if not trace.events:
            return []
        times = dict(trace.events)
        first, last = min(times.values()), max(times.values())
        parent = int(trace.parent_span, 16) if trace.parent_span else 0
        spans = [span for child in trace.children for span in self._spans(child)]
        request_id, model_id = (0 if trace.caller else self._ids.generate_span_id()), int(trace.span_id, 16)
        compute = [time_ns for name, time_ns in trace.events if name.startswith("COMPUTE_")]
        of_request: list[Any] = []
        of_model: list[Any] = []
        of_compute: list[Any] = []
        for name, time_ns in trace.events:
            event = self._trace.Event(name, timestamp=time_ns + self._offset_ns)
            if name == _COMPLETE and trace.caller is not None:
                continue  # the caller's request goes on, and its span has an event of this name
            if request_id and (name == _COMPLETE or name.startswith(("HTTP_", "GRPC_"))):
                of_request.append(event)
            else:
                (of_compute if compute and name.startswith("COMPUTE_") else of_model).append(event)
        trace_id = int(trace.trace_id, 16)
        if request_id:
            spans.append(self._span(trace_id, request_id, parent, "InferRequest", first, last, of_request, _SERVER))
        began, ended = times.get("REQUEST_START", first), times.get("REQUEST_END", last)
        attributes = {
            "triton.model_name": trace.model_name,
            "triton.model_version": str(trace.version),
            "triton.trace_request_id": trace.request_id,
        }
        spans.append(
            self._span(
                trace_id,
                model_id,
                request_id or parent,
                trace.model_name,
                began,
                ended,
                of_model,
                attributes=attributes,
            )
        )
        spans += [
            self._span(trace_id, self._ids.generate_span_id(), model_id, name, times[start], times[end], ())
            for name, start, end in _PHASES
            if start in times and end in times
        ]
        if compute:
            inside = self._ids.generate_span_id()
            spans.append(self._span(trace_id, inside, model_id, "compute", min(compute), max(compute), of_compute))
        return spans

    def _span(
        self,
        trace_id: int,
        span_id: int,
        parent_id: int,
        name: str,
        start_ns: int,
        end_ns: int,
        events: Sequence[Any],
        kind: str = _INTERNAL,
        attributes: Mapping[str, str] | None = None,
    ) -> Any:
        api = self._api
        flags = api.TraceFlags(api.TraceFlags.SAMPLED)
        return self._trace.ReadableSpan(
            name,
            context=api.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags),
            parent=api.SpanContext(trace_id, parent_id, is_remote=kind == _SERVER) if parent_id else None,
            resource=self._resource,
            attributes=attributes,
            events=events,
            kind=api.SpanKind[kind],
            start_time=start_ns + self._offset_ns,
            end_time=end_ns + self._offset_ns,
            instrumentation_scope=self._scope,
        )


class Sampler:
    """Which requests are traced, by a sampler of the SDK: `always_on`, `traceidratio:0.1`, `parentbased_...`.

    Raises UnavailableError without the extra.
    """

    def __init__(self, text: str) -> None:
        name, _, ratio = text.partition(":")
        sampling = _sdk("sdk.trace.sampling")
        self._api = _sdk("trace")
        root = name.removeprefix("parentbased_")
        sampler = {"always_on": sampling.ALWAYS_ON, "always_off": sampling.ALWAYS_OFF}.get(root)
        sampler = sampler or sampling.TraceIdRatioBased(float(ratio or 1))
        self._sampler = sampling.ParentBased(sampler) if name != root else sampler
        self._ids = _sdk("sdk.trace.id_generator").RandomIdGenerator()

    def context(self, parent: tuple[str, str] | None, *, is_sampled: bool, name: str) -> tuple[str, str] | None:
        """Trace id and parent's span id of a request to trace; None for one that is not. `parent`: the client's."""
        if parent is None:
            trace_id, around = self._ids.generate_trace_id(), None
        else:
            trace_id = int(parent[0], 16)
            flags = self._api.TraceFlags(int(is_sampled))
            span = self._api.SpanContext(trace_id, int(parent[1], 16), is_remote=True, trace_flags=flags)
            around = self._api.set_span_in_context(self._api.NonRecordingSpan(span))
        if not self._sampler.should_sample(around, trace_id, name).decision.is_sampled():
            return None
        return parent or (f"{trace_id:032x}", "")


def parse_context(traceparent: str) -> tuple[str, str] | None:
    """Trace id and span id of a W3C `traceparent`; None if it is invalid (W3C Trace Context, section 3.2)."""
    parts = traceparent.strip().lower().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    if any(set(part) - set("0123456789abcdef") for part in parts[:4]) or not int(parts[1], 16) or not int(parts[2], 16):
        return None
    return parts[1], parts[2]


def is_sampled(traceparent: str) -> bool:
    """Whether a valid `traceparent` says that its caller records the trace."""
    return bool(int(traceparent.strip().split("-")[3], 16) & 1)


class OtelExport:
    """Pushes metrics and logs of the server while it runs: those for which `OTEL_{METRICS,LOGS}_EXPORTER` is otlp.

    `collect` makes the families of the page of metrics; it is called from a thread of this object, every
    `OTEL_METRIC_EXPORT_INTERVAL` milliseconds (60,000) and at the end. Raises UnavailableError without the extra,
    InvalidArgumentError for a bad interval.
    """

    def __init__(self, environment: Mapping[str, str], version: str, collect: Callable[[], Iterable[Metric]]) -> None:
        def protocol(signal: str) -> str:
            general = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
            return environment.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or general

        service = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "modelserver"}
        if "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            service = {}
        resource = _sdk("sdk.resources").Resource.create(service)
        self._pusher: _MetricsPusher | None = None
        self._handler: _LogHandler | None = None
        if environment.get("OTEL_METRICS_EXPORTER") == "otlp":
            interval_s = _interval_s(environment)
            exporter = _exporter("metric_exporter", "OTLPMetricExporter", protocol("METRICS"))
            self._pusher = _MetricsPusher(exporter, resource, version, collect, interval_s)
        if environment.get("OTEL_LOGS_EXPORTER") == "otlp":
            exporter = _exporter("_log_exporter", "OTLPLogExporter", protocol("LOGS"))
            self._handler = _LogHandler(exporter, resource, version)
            logging.getLogger(_ROOT_LOGGER).addHandler(self._handler)

    @classmethod
    def of(
        cls, environment: Mapping[str, str], version: str, collector: Callable[[], Callable[[], Iterable[Metric]]]
    ) -> OtelExport | None:
        """None if the variables ask for neither; `collector` makes `collect`."""
        asked = (environment.get("OTEL_METRICS_EXPORTER"), environment.get("OTEL_LOGS_EXPORTER"))
        return cls(environment, version, collector()) if "otlp" in asked else None

    def close_metrics(self) -> None:
        """Send the metrics a last time. Blocking."""
        if self._pusher is not None:
            self._pusher.close()

    def close(self) -> None:
        """Send the logs that are left. Blocking."""
        if self._handler is not None:
            logging.getLogger(_ROOT_LOGGER).removeHandler(self._handler)
            self._handler.close()


def _interval_s(environment: Mapping[str, str]) -> float:
    text = environment.get(_INTERVAL_VARIABLE) or str(_DEFAULT_INTERVAL_MS)
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise InvalidArgumentError(f"{_INTERVAL_VARIABLE}={text}: expected a number of milliseconds")
    return int(text) / 1000


class _MetricsPusher:
    """A thread that reads the families and pushes them."""

    def __init__(
        self,
        exporter: Any,
        resource: Any,
        version: str,
        collect: Callable[[], Iterable[Metric]],
        interval_s: float,
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._collect = collect
        self._interval_s = interval_s
        self._points = _sdk("sdk.metrics.export")
        self._success = self._points.MetricExportResult.SUCCESS
        self._scope = _sdk("sdk.util.instrumentation").InstrumentationScope(_ROOT_LOGGER, version)
        self._began_ns = time.time_ns()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otel-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_ending.set()
        self._thread.join(self._interval_s + 1)
        self._exporter.shutdown()
        self._thread.join()

    def _run(self) -> None:
        is_running = True
        while is_running:
            is_running = not self._is_ending.wait(self._interval_s)
            try:
                families = list(self._collect())
            except RuntimeError:
                return  # the event loop, which knows the numbers, has ended
            except Exception:
                logger.exception("the metrics could not be read; they are next sent in %g s", self._interval_s)
                continue
            try:
                if self._exporter.export(self._data(families)) is not self._success:
                    logger.error("the collector did not take %d families of metrics", len(families))
            except Exception:
                logger.exception("the metrics could not be sent; they are next sent in %g s", self._interval_s)

    def _data(self, families: Iterable[Metric]) -> Any:
        """The families, read from their page: those of models are kept as lines of it."""
        now_ns = time.time_ns()
        page = b"".join(finish(text_slices(families))).decode()
        families = text_string_to_metric_families(page)
        made = [self._metric(family, now_ns) for family in families if family.samples]
        points = self._points
        scope = points.ScopeMetrics(self._scope, made, "")
        return points.MetricsData([points.ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, family: Metric, now_ns: int) -> Any:
        points = self._points
        cumulative = points.AggregationTemporality.CUMULATIVE
        data: Any
        if family.type == "histogram":
            data = points.Histogram([*self._histograms(family, now_ns)], cumulative)
        else:
            numbers = [
                points.NumberDataPoint(dict(each.labels), self._began_ns, now_ns, float(each.value))
                for each in family.samples
                if not each.name.endswith("_created")
            ]
            is_sum = family.type == "counter"
            data = points.Sum(numbers, cumulative, is_monotonic=True) if is_sum else points.Gauge(numbers)
        return points.Metric(family.name, family.documentation, family.unit or "", data)

    def _histograms(self, family: Metric, now_ns: int) -> Iterable[Any]:
        """The series of a histogram. Prometheus' buckets count all smaller values too; OTLP's do not."""
        series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            one = series.setdefault(tuple(sorted(labels.items())), {"bounds": [], "counts": []})
            if sample.name.endswith("_bucket"):
                one["bounds"].append(float(sample.labels["le"]))
                one["counts"].append(int(sample.value))
            elif sample.name.endswith("_sum"):
                one["sum"] = float(sample.value)
        for labels_key, one in series.items():
            below = [0, *one["counts"]]
            yield self._points.HistogramDataPoint(
                dict(labels_key),
                self._began_ns,
                now_ns,
                count=below[-1],
                sum=one.get("sum", 0.0),
                bucket_counts=[after - before for before, after in pairwise(below)],
                explicit_bounds=[bound for bound in one["bounds"] if bound != float("inf")],
                min=None,
                max=None,
            )


class _LogHandler(logging.Handler):
    """Hands records to the SDK, which sends them in batches from a thread of its own."""

    def __init__(self, exporter: Any, resource: Any, version: str) -> None:
        super().__init__()
        logs = _sdk("sdk._logs")
        self._severities = _sdk("_logs").SeverityNumber
        self._provider = logs.LoggerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_log_record_processor(_sdk("sdk._logs.export").BatchLogRecordProcessor(exporter))
        self._logger = self._provider.get_logger(_ROOT_LOGGER, version)

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelno
        names = ((logging.ERROR, "ERROR"), (logging.WARNING, "WARN"), (logging.INFO, "INFO"), (0, "DEBUG"))
        severity = next(name for lowest, name in names if level >= lowest)
        try:
            self._logger.emit(
                timestamp=int(record.created * 1e9),
                severity_number=self._severities[severity],
                severity_text=record.levelname,
                body=record.getMessage(),
                attributes={"logger": record.name},
            )
        except Exception:  # as every handler: whoever logs goes on
            self.handleError(record)

    def close(self) -> None:
        self._provider.shutdown()
        super().close()

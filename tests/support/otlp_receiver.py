"""A collector of OpenTelemetry: takes OTLP by gRPC, and by HTTP in protobuf, and keeps it as JSON documents."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_MESSAGES = {
    "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
    "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
    "/v1/logs": logs_service_pb2.ExportLogsServiceRequest,
}
_IDS = ("traceId", "spanId", "parentSpanId")


class OtlpReceiver:
    """What was received: `requests` are the documents of spans, `metrics` and `logs` those of the others."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.logs: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.problems: list[str] = []
        self.url = ""
        self.grpc_url = ""

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [span for document in self.requests for span in _parts(document, "resourceSpans", "scopeSpans", "spans")]

    @property
    def newest_metrics(self) -> dict[str, dict[str, Any]]:
        families = _parts(self.metrics[-1], "resourceMetrics", "scopeMetrics", "metrics") if self.metrics else []
        return {family["name"]: family for family in families}

    @property
    def records(self) -> list[dict[str, Any]]:
        return [one for document in self.logs for one in _parts(document, "resourceLogs", "scopeLogs", "logRecords")]

    def take(self, path: str, message: Any) -> None:
        document = MessageToDict(message)
        for span in _parts(document, "resourceSpans", "scopeSpans", "spans"):
            span.update({key: base64.b64decode(span[key]).hex() for key in _IDS if key in span})
            span.setdefault("events", [])
        {"/v1/traces": self.requests, "/v1/metrics": self.metrics, "/v1/logs": self.logs}[path].append(document)


def _parts(document: dict[str, Any], of_resource: str, of_scope: str, name: str) -> list[dict[str, Any]]:
    return [
        part for outer in document.get(of_resource, ()) for inner in outer[of_scope] for part in inner.get(name, ())
    ]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on ports of its own until the block ends."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append(dict(self.headers))
            if self.headers["Content-Type"] == "application/x-protobuf" and self.path in _MESSAGES:
                receiver.take(self.path, _MESSAGES[self.path].FromString(body))
            else:
                receiver.problems.append(f"{self.path} {self.headers['Content-Type']}")
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    class Service:
        def __init__(self, path: str, answer: Any) -> None:
            self._path, self._answer = path, answer

        def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  # gRPC's name
            receiver.headers.append({key: str(value) for key, value in context.invocation_metadata()})
            receiver.take(self._path, request)
            return self._answer()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    rpc = grpc.server(ThreadPoolExecutor(2))
    traces = Service("/v1/traces", trace_service_pb2.ExportTraceServiceResponse)
    metrics = Service("/v1/metrics", metrics_service_pb2.ExportMetricsServiceResponse)
    logs = Service("/v1/logs", logs_service_pb2.ExportLogsServiceResponse)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, rpc)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, rpc)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(logs, rpc)
    receiver.grpc_url = f"http://127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    rpc.start()
    receiver.url = f"127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield receiver
    finally:
        rpc.stop(None).wait()
        server.shutdown()
        thread.join()
        server.server_close()

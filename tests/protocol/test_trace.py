"""Request tracing: its settings over both protocols, Triton's files, and OpenTelemetry."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.core import GaugeMetricFamily
from support.clients import ClientError, HttpClient, ProtocolClient
from support.model_files import write_identity, write_model
from support.otlp_receiver import otlp_receiver
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.errors import ErrorCode
from modelserver.options.sources import resolve_options
from modelserver.telemetry.otel import OtelExport
from modelserver.telemetry.trace_settings import parse_trace_config
from modelserver.telemetry.tracer import Tracer

DATA = np.array([[1, 2.5]], np.float32)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def _config(directory: Path, *more: str) -> tuple[str, ...]:
    return (f"triton,file={directory / 'trace.json'}", *more)


def _repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_identity(root, "echo")
    write_identity(root, "other")
    return root


@pytest.fixture
def served(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(_repository(tmp_path), trace_config=_config(tmp_path)) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def _settings(client: ProtocolClient, model: str = "", **changes: Any) -> dict[str, list[str]]:
    if changes:
        answer: Any = client._call(client.raw.update_trace_settings, model_name=model, settings=changes)
    else:
        answer = client._call(client.raw.get_trace_settings, model_name=model)
    if client.name == "http":
        return {name: [value] if isinstance(value, str) else value for name, value in answer.items()}
    return {name: list(setting.value) for name, setting in answer.settings.items()}


def _traces(file: Path) -> list[dict[str, Any]]:
    """The traces of a file: names of the events in the order of time, and what else is told of each."""
    found: dict[int, dict[str, Any]] = {}
    for row in json.loads(file.read_text()):
        trace = found.setdefault(row["id"], {"times": [], "tensors": []})
        for stamp in row.get("timestamps", ()):
            trace["times"].append((stamp["ns"], stamp["name"]))
        if "activity" in row:
            trace["tensors"].append((row["activity"], row["tensor"]))
        trace |= {key: row[key] for key in ("model_name", "model_version", "request_id") if key in row}
    for trace in found.values():
        trace["events"] = [name for _, name in sorted(trace.pop("times"), key=lambda time: time[0])]
    return list(found.values())


def test_settings_of_the_server_and_of_a_model(client: ProtocolClient, tmp_path: Path) -> None:
    start = {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_file": [str(tmp_path / "trace.json")],
        "trace_mode": ["triton"],
    }
    assert _settings(client) == start
    assert _settings(client, trace_rate="5", trace_level=["TIMESTAMPS"])["trace_rate"] == ["5"]
    assert _settings(client, "echo", trace_rate="7", trace_count="3")["trace_level"] == ["TIMESTAMPS"]
    assert _settings(client, trace_level=["TIMESTAMPS", "TENSORS"])["trace_rate"] == ["5"]
    own = _settings(client, "echo")
    assert (own["trace_rate"], own["trace_count"], own["trace_level"]) == (["7"], ["3"], ["TIMESTAMPS", "TENSORS"])
    assert _settings(client, "echo", trace_rate=None)["trace_rate"] == ["5"]
    assert _settings(client, "echo", trace_count=None) == _settings(client, "other")
    assert _settings(client, trace_rate=None, trace_level=None) == start


@pytest.mark.parametrize(
    ("changes", "text", "code"),
    [
        ({"trace_rate": "x"}, "Unable to parse 'trace_rate', got: x", ErrorCode.INVALID_ARGUMENT),
        ({"trace_rate": "0"}, "Expecting value >= 1", ErrorCode.INVALID_ARGUMENT),
        ({"trace_count": "-2"}, "Expecting value >= -1, got:-2", ErrorCode.INVALID_ARGUMENT),
        ({"log_frequency": "-3"}, "Expecting value >= 0", ErrorCode.INVALID_ARGUMENT),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, "only one trace level 'OFF'", ErrorCode.INVALID_ARGUMENT),
        ({"trace_level": ["ALL"]}, "'trace_level' must be one of", ErrorCode.INVALID_ARGUMENT),
        ({"trace_levels": ["OFF"]}, "did you mean 'trace_level'", ErrorCode.INVALID_ARGUMENT),
        ({"trace_file": "/tmp/x"}, "trace file location can not be updated", ErrorCode.UNSUPPORTED),
    ],
)
def test_what_is_no_setting_changes_nothing(
    client: ProtocolClient, changes: dict[str, Any], text: str, code: ErrorCode
) -> None:
    before = _settings(client)
    with pytest.raises(ClientError, match=text) as caught:
        _settings(client, **(changes | {"trace_rate": "3"} if "trace_rate" not in changes else changes))
    assert caught.value.code is code
    assert _settings(client) == before


def test_a_model_that_nobody_knows_has_no_settings(client: ProtocolClient) -> None:
    for changes in ({}, {"trace_rate": "1"}):
        with pytest.raises(ClientError, match="Request for unknown model : nope"):
            _settings(client, "nope", **changes)


def test_values_are_strings(served: RunningServer) -> None:
    answer = httpx.post(f"http://{served.http_url}/v2/trace/setting", json={"trace_rate": 5})
    assert answer.status_code == 400
    assert "must be a string" in answer.json()["error"]


def test_a_file_has_the_times_and_tensors_of_every_second_request(
    protocol: type[ProtocolClient], tmp_path: Path
) -> None:
    levels = ("level=TIMESTAMPS", "level=TENSORS", "rate=2")
    with (
        running_server(_repository(tmp_path), trace_config=_config(tmp_path, *levels)) as running,
        protocol(running) as client,
    ):
        for number in range(4):
            client.infer("echo", {"INPUT0": DATA}, request_id=f"r{number}")
    traces = _traces(tmp_path / "trace.json")
    assert [(trace["request_id"], trace["model_name"], trace["model_version"]) for trace in traces] == [
        ("r1", "echo", 1),
        ("r3", "echo", 1),
    ]
    inner = [
        "REQUEST_START",
        "QUEUE_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
    ]
    outer = ("HTTP_RECV", "HTTP_SEND") if client.name == "http" else ("GRPC_WAITREAD", "GRPC_SEND")
    names = [f"{name}_{end}" for name in outer for end in ("START", "END")]
    assert traces[0]["events"] == [*names[:2], *inner, *names[2:]]
    tensor = {"data": "1,2.5", "shape": "1,2", "dtype": "FP32"}
    assert traces[0]["tensors"] == [
        ("TENSOR_QUEUE_INPUT", {"name": "INPUT0"} | tensor),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUTPUT0"} | tensor),
    ]


def test_a_model_is_traced_alone_until_its_count_is_used_up(client: ProtocolClient, served: RunningServer) -> None:
    _settings(client, "echo", trace_level=["TIMESTAMPS"], trace_rate="1", trace_count="2")
    for _ in range(3):
        client.infer("echo", {"INPUT0": DATA})
        client.infer("other", {"INPUT0": DATA})
    assert _settings(client, "echo")["trace_count"] == ["0"]
    served.call(served.server.dataplane.tracer.close)
    traces = _traces(Path(_settings(client)["trace_file"][0]))
    assert [trace["model_name"] for trace in traces] == ["echo", "echo"]


def test_files_take_turns(protocol: type[ProtocolClient], tmp_path: Path) -> None:
    flags = _config(tmp_path, "level=TIMESTAMPS", "rate=1", "triton,log-frequency=2")
    with running_server(_repository(tmp_path), trace_config=flags) as running, protocol(running) as client:
        for _ in range(5):
            client.infer("echo", {"INPUT0": DATA})
    files = sorted(file.name for file in tmp_path.iterdir() if file.is_file())
    assert files == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert [len(_traces(tmp_path / file)) for file in files] == [2, 2, 1]


def test_spans_reach_a_collector_as_part_of_the_clients_trace(protocol: type[ProtocolClient], tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        flags = (
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            "rate=1000",
            f"opentelemetry,url={receiver.url}",
            "opentelemetry,resource=service.name=shop",
            "opentelemetry,bsp_schedule_delay=10",
        )
        with running_server(_repository(tmp_path), trace_config=flags) as running, protocol(running) as client:
            shown = _settings(client)
            assert shown["url"] == [receiver.url]
            assert shown["resource"] == ["service.name=shop"]
            assert "trace_file" not in shown
            client.infer("echo", {"INPUT0": DATA}, request_id="a", headers={"traceparent": PARENT})
            client.infer("echo", {"INPUT0": DATA}, request_id="b", headers={"traceparent": "nonsense"})
    assert receiver.problems == []
    (resource,) = receiver.requests[0]["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "shop"}} in resource["resource"]["attributes"]
    request, model, queue, compute = receiver.spans
    _, trace_id, parent_id, _ = PARENT.split("-")
    assert {span["traceId"] for span in (request, model, compute)} == {trace_id}
    assert request["parentSpanId"] == parent_id
    assert model["parentSpanId"] == request["spanId"]
    assert queue["parentSpanId"] == compute["parentSpanId"] == model["spanId"]
    assert [span["name"] for span in receiver.spans] == ["InferRequest", "echo", "queue", "compute"]
    assert queue["endTimeUnixNano"] == compute["startTimeUnixNano"]
    assert int(request["startTimeUnixNano"]) <= int(compute["startTimeUnixNano"]) <= int(compute["endTimeUnixNano"])
    assert [event["name"] for event in model["events"]] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert "INFER_RESPONSE_COMPLETE" in [event["name"] for event in request["events"]]
    assert [event["name"] for event in compute["events"]] == [
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
    ]


def test_a_rate_of_zero_traces_only_requests_with_a_context(tmp_path: Path) -> None:
    """And the collector gets no more spans in a message than it is said to take."""
    with otlp_receiver() as receiver:
        flags = (
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            "rate=0",
            f"opentelemetry,url={receiver.url}",
            "opentelemetry,bsp_schedule_delay=0",
            "opentelemetry,bsp_max_export_batch_size=3",
        )
        with running_server(_repository(tmp_path), trace_config=flags) as running, HttpClient(running) as client:
            assert _settings(client)["trace_rate"] == ["0"]
            client.infer("echo", {"INPUT0": DATA})
            client.infer("echo", {"INPUT0": DATA}, headers={"traceparent": PARENT})
            client.infer("other", {"INPUT0": DATA})
    assert [span["name"] for span in receiver.spans] == ["InferRequest", "echo", "queue", "compute"]
    assert [len(request["resourceSpans"][0]["scopeSpans"][0]["spans"]) for request in receiver.requests] == [3, 1]


def test_traces_that_a_full_queue_drops_are_mentioned_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with otlp_receiver() as receiver:
        flags = (
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            "rate=1",
            f"opentelemetry,url={receiver.url}",
            "opentelemetry,bsp_schedule_delay=60000",
            "opentelemetry,bsp_max_queue_size=1",
        )
        with running_server(_repository(tmp_path), trace_config=flags) as running, HttpClient(running) as client:
            for _ in range(12):
                client.infer("echo", {"INPUT0": DATA})
    dropped = [record for record in caplog.records if "the queue of traces is full" in record.message]
    assert len(dropped) in (1, 2)  # two if the queue was full before its first trace was taken, too
    assert 1 <= sum(span["name"] == "InferRequest" for span in receiver.spans) <= 3


CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            context = request.trace().get_context()
            inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0")]
            call = {"requested_output_names": ["OUTPUT0"], "inputs": inputs}
            traced = pb_utils.InferenceRequest(model_name="echo", trace=request.trace(), **call).exec()
            pb_utils.InferenceRequest(model_name="other", **call).exec()
            outputs = [pb_utils.Tensor("OUTPUT0", traced.output_tensors()[0].as_numpy())]
            answers.append(pb_utils.InferenceResponse(outputs, parameters={"context": str(context)}))
        return answers
"""
CALLER_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "echo" input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "mid" } },
    { model_name: "caller" input_map { key: "INPUT0" value: "mid" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
  ]
}
"""


def _calling_repository(tmp_path: Path) -> Path:
    """An ensemble of `echo` and `caller`, which calls `echo` as part of the request, and `other` by itself."""
    root = _repository(tmp_path)
    (write_model(root, "caller", CALLER_CONFIG) / "1" / "model.py").write_text(CALLER)
    write_model(root, "both", ENSEMBLE_CONFIG)
    return root


def test_requests_of_ensembles_and_models_are_traced_as_parts(protocol: type[ProtocolClient], tmp_path: Path) -> None:
    flags = _config(tmp_path, "level=TIMESTAMPS", "rate=2")
    with running_server(_calling_repository(tmp_path), trace_config=flags) as running, protocol(running) as client:
        for _ in range(2):
            answer = client.infer("both", {"INPUT0": DATA})
    assert answer.parameters["context"] == "None"
    rows = [row for row in json.loads((tmp_path / "trace.json").read_text()) if "model_name" in row]
    assert [(row["model_name"], row.get("parent_id")) for row in rows] == [
        ("echo", 1),
        ("echo", 3),
        ("caller", 1),
        ("both", None),
    ]
    events = {trace["model_name"]: trace["events"] for trace in _traces(tmp_path / "trace.json")}
    assert "COMPUTE_START" in events["caller"]
    assert "COMPUTE_START" not in events["both"]
    assert not any(name.startswith(("HTTP", "GRPC")) for name in events["echo"])


def test_spans_of_models_that_a_request_calls_are_within_its_own(
    protocol: type[ProtocolClient], tmp_path: Path
) -> None:
    with otlp_receiver() as receiver:
        flags = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1000", f"opentelemetry,url={receiver.url}")
        with running_server(_calling_repository(tmp_path), trace_config=flags) as running, protocol(running) as client:
            answer = client.infer("both", {"INPUT0": DATA}, headers={"traceparent": PARENT})
    spans = {span["spanId"]: span for span in receiver.spans}
    of_models = [span for span in spans.values() if span["name"] not in ("InferRequest", "queue", "compute")]
    parents = {(span["name"], spans[span["parentSpanId"]]["name"]) for span in of_models}
    assert parents == {("both", "InferRequest"), ("caller", "both"), ("echo", "both"), ("echo", "caller")}
    assert len(of_models) == 4
    assert {span["traceId"] for span in spans.values()} == {PARENT.split("-")[1]}
    (caller,) = (span for span in of_models if span["name"] == "caller")
    context = json.loads(answer.parameters["context"])["traceparent"]
    assert context == f"00-{caller['traceId']}-{caller['spanId']}-01"


@pytest.mark.one_layout
def test_opentelemetrys_variables_send_all_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By gRPC and by HTTP, as the names of the variables' signals say, with the headers that a collector wants."""
    with otlp_receiver() as receiver:
        variables = {
            "OTEL_SERVICE_NAME": "shop",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_url,
            "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": f"http://{receiver.url.replace('traces', 'logs')}",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        options = resolve_options([str(_repository(tmp_path))], os.environ).options
        with running_server(_repository(tmp_path), trace_config=options.trace_config) as running:
            with HttpClient(running) as client:
                client.infer("echo", {"INPUT0": DATA}, headers={"traceparent": PARENT})
                client.infer("echo", {"INPUT0": DATA}, headers={"traceparent": f"{PARENT[:-1]}1"})
            monkeypatch.setattr(logging, "raiseExceptions", False)
            logging.getLogger("modelserver.test").warning("%d open", "shop")  # a fault that does not reach its caller
            logging.getLogger("modelserver.test").warning("the shop is open")
    assert receiver.problems == []
    assert [span["name"] for span in receiver.spans] == ["InferRequest", "echo", "queue", "compute"]
    documents = (
        receiver.requests[0]["resourceSpans"],
        receiver.metrics[0]["resourceMetrics"],
        receiver.logs[0]["resourceLogs"],
    )
    for (one,) in documents:
        assert {"key": "service.name", "value": {"stringValue": "shop"}} in one["resource"]["attributes"]
    assert all(
        {key.lower(): value for key, value in headers.items()}["x-key"] == "secret" for headers in receiver.headers
    )
    families = receiver.newest_metrics
    (point,) = [each for each in families["nv_inference_count"]["sum"]["dataPoints"] if _model(each) == "echo"]
    assert (point["asDouble"], families["nv_inference_count"]["sum"]["isMonotonic"]) == (2.0, True)
    assert "dataPoints" in families["nv_cpu_utilization"]["gauge"]
    histogram = next(family["histogram"] for family in families.values() if "histogram" in family)["dataPoints"][0]
    assert int(histogram["count"]) == sum(map(int, histogram["bucketCounts"]))
    assert len(histogram["bucketCounts"]) == len(histogram["explicitBounds"]) + 1
    (record,) = [each for each in receiver.records if each["body"]["stringValue"] == "the shop is open"]
    assert record["severityNumber"] == "SEVERITY_NUMBER_WARN"


@pytest.mark.one_layout
def test_metrics_are_sent_again_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family = GaugeMetricFamily("shops", "open shops", 3)
    faults: list[list[Any] | Exception] = [ValueError("torn"), [object()], [family]]

    def collect() -> list[Any]:
        found = faults[0] if len(faults) == 1 else faults.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.grpc_url)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
        export = OtelExport(os.environ, "1", collect)
        until_true(lambda: bool(receiver.metrics), "metrics come")
        export.close_metrics()
    assert receiver.newest_metrics["shops"]["gauge"]["dataPoints"][0]["asDouble"] == 3.0
    for what in ("read", "sent"):
        assert f"the metrics could not be {what}; they are next sent in 0.01 s" in caplog.text


def _model(point: dict[str, Any]) -> str:
    return next(each["value"]["stringValue"] for each in point["attributes"] if each["key"] == "model")


@pytest.mark.one_layout
@pytest.mark.parametrize(
    ("sampler", "flags", "is_traced"),
    [
        ("always_on", "00", True),
        ("always_off", "01", False),
        ("parentbased_always_off", "01", True),
        ("parentbased_traceidratio:1", "00", False),
        ("parentbased_traceidratio:1", "", True),
        ("traceidratio:0", "", False),
    ],
)
def test_samplers_of_opentelemetry_choose(sampler: str, flags: str, is_traced: bool) -> None:
    settings = ["mode=opentelemetry", "level=TIMESTAMPS", f"opentelemetry,sampler={sampler}"]
    tracer = Tracer(parse_trace_config(settings))
    parent = f"{PARENT[:-2]}{flags}" if flags else ""
    trace = tracer.sample("echo", parent)
    assert (trace is not None) == is_traced
    if trace is not None and parent:
        assert (trace.trace_id, trace.parent_span) == tuple(parent.split("-")[1:3])


@pytest.mark.one_layout
def test_a_collector_that_is_not_there_costs_traces_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    flags = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", "opentelemetry,url=127.0.0.1:9/v1/traces")
    with running_server(_repository(tmp_path), trace_config=flags) as running:
        document = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
        for _ in range(3):
            assert httpx.post(f"http://{running.http_url}/v2/models/echo/infer", json=document).status_code == 200


def test_the_newest_traces_can_be_read_without_a_file(tmp_path: Path) -> None:
    with running_server(_repository(tmp_path)) as running, HttpClient(running) as client:
        client.infer("echo", {"INPUT0": DATA})
        assert httpx.get(f"http://{running.http_url}/v2/trace/recent").json() == {"traces": []}
        _settings(client, "echo", trace_level=["TIMESTAMPS"], trace_rate="1")
        for name in ("first", "second"):
            client.infer("echo", {"INPUT0": DATA}, request_id=name)
        client.infer("other", {"INPUT0": DATA})
        traces = httpx.get(f"http://{running.http_url}/v2/trace/recent").json()["traces"]
    assert [(trace["model_name"], trace["request_id"]) for trace in traces] == [("echo", "second"), ("echo", "first")]
    times = [event["ns"] for event in traces[0]["timestamps"]]
    assert {"REQUEST_START", "COMPUTE_START", "COMPUTE_END", "REQUEST_END"} <= {
        event["name"] for event in traces[0]["timestamps"]
    }
    assert times == sorted(times)
    assert traces[0]["children"] == []

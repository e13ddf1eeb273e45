"""What flags change: restricted calls, forwarded headers, the response cache, the rate limiter, trace files."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from support.differential.facts import Case, http_facts, rpc_facts
from support.differential.inference import Inference, Input
from support.differential.target import Target
from tritonclient.grpc import service_pb2

# Loaded in both servers, which have these flags; the trace's file is below a directory of each.
FLAG_MODELS = ("echo", "told", "cached", "limited", "ensemble", "add_sub")
FLAGS = {
    "http_restricted_api": ("model-repository,logging:admin=secret", "statistics:reader=open"),
    "grpc_restricted_protocol": ("model-repository,logging:admin=secret", "statistics:reader=open"),
    "http_header_forward_pattern": "(fw|forwarded)-.*",
    "grpc_header_forward_pattern": "(fw|forwarded)-.*",
    "cache_config": ("local,size=4194304",),
    "rate_limit": "execution_count",
    "rate_limit_resource": ("R1:4",),
}
TRACE_FLAGS = ("mode=triton", "level=TIMESTAMPS", "rate=1", "triton,log-frequency=1")

_TOLD = Inference("told", (Input("INPUT0", "INT32", (1,), (1,)),))
_KEYS: dict[str, dict[str, str]] = {
    "without": {},
    "with another key": {"other": "secret"},
    "with a wrong secret": {"admin": "open"},
    "with the secret": {"admin": "secret"},
    "as a reader": {"reader": "open"},
}
_HTTP_CALLS = (
    ("POST", "/v2/repository/index", None),
    ("POST", "/v2/repository/models/echo/load", None),
    ("GET", "/v2/logging", None),
    ("GET", "/v2/models/echo/stats", None),
    ("GET", "/v2/models/echo", None),
    ("GET", "/v2/health/ready", None),
)
_RPCS: tuple[tuple[str, Message], ...] = (
    ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="echo")),
    ("LogSettings", service_pb2.LogSettingsRequest()),
    ("ModelStatistics", service_pb2.ModelStatisticsRequest(name="echo")),
    ("ModelMetadata", service_pb2.ModelMetadataRequest(name="echo")),
    ("ServerReady", service_pb2.ServerReadyRequest()),
)


def _restricted_http(method: str, path: str, headers: dict[str, str], target: Target) -> Any:
    """Whether it is refused, and how: what is answered otherwise other cases compare."""
    reply = target.http(method, path, None, headers)
    return {"status": reply.status} if reply.status < 400 else http_facts(reply, "restricted", "admin", "reader")


def _restricted_rpc(name: str, message: Message, metadata: dict[str, str], target: Target) -> Any:
    reply = target.rpc(name, message, {f"triton-grpc-protocol-{key}": value for key, value in metadata.items()})
    return {"code": reply.code} if reply.code == "OK" else rpc_facts(reply, "restricted", "admin", "reader")


def _forwarded(form: str, headers: dict[str, str], target: Target) -> Any:
    """The parameters that a model sees of a request with these headers."""
    if form.startswith("http"):
        document = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [1]}]}
        reply = target.http("POST", "/v2/models/told/infer", document, headers)
        if reply.status != 200:
            return http_facts(reply, *headers)
        texts = {output["name"]: output["data"] for output in reply.document()["outputs"]}
        return json.loads(texts["TOLD"][0])["parameters"]
    request = service_pb2.ModelInferRequest(model_name="told")
    tensor = request.inputs.add(name="INPUT0", datatype="INT32", shape=[1])
    tensor.contents.int_contents.append(1)
    call = target.rpc("ModelInfer", request, headers)
    if call.code != "OK":
        return rpc_facts(call, *headers)
    for output, raw in zip(call.message.outputs, call.message.raw_output_contents, strict=True):
        if output.name == "TOLD":
            return json.loads(raw[4:])["parameters"]
    return None


def _counts(name: str, target: Target) -> dict[str, int]:
    """How often it has answered, executed, found an answer and not found one."""
    reply = target.http("GET", f"/v2/models/{name}/stats", headers={"reader": "open"}).document()["model_stats"][0]
    counts = {key: int(reply["inference_stats"][key]["count"]) for key in _COUNTED}
    return counts | {"executions": int(reply["execution_count"]), "rows": int(reply["inference_count"])}


_COUNTED = ("success", "fail", "queue", "compute_infer", "cache_hit", "cache_miss")


def _grown(name: str, asked: tuple[Inference, ...], target: Target) -> Any:
    before = _counts(name, target)
    answers = [inference.ask(target, "grpc-raw") for inference in asked]
    after = _counts(name, target)
    return {"answers": answers, **{key: after[key] - before[key] for key in after}}


def _cached(*values: float, **details: Any) -> Inference:
    return Inference("cached", (Input("INPUT0", "FP32", (1, len(values)), values),), **details)


_CACHED: dict[str, tuple[Inference, ...]] = {
    "the same twice": (_cached(1.0, 2.0), _cached(1.0, 2.0)),
    "other data": (_cached(3.0), _cached(4.0)),
    "another id": (_cached(5.0, id="a"), _cached(5.0, id="b")),
    "another shape": (_cached(6.0, 6.0), _cached(6.0, 6.0, 6.0)),
}


def _cache_families(target: Target) -> Any:
    lines = target.metrics().splitlines()
    return {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE nv_cache")}


def _traced(inference: Inference, target: Target) -> Any:
    """The requests of the newest trace file: models, parents by position, and their events in order."""
    file = target.http("GET", "/v2/trace/setting").document()["trace_file"]
    count = len(list(Path(file).parent.glob(f"{Path(file).name}.*")))
    inference.ask(target, "http-json")
    path = Path(f"{file}.{count}")
    deadline_s = time.monotonic() + 10
    while not path.exists() or not path.read_text().endswith("]"):
        assert time.monotonic() < deadline_s, f"{path} is not written"
        time.sleep(0.02)
    rows = json.loads(path.read_text())
    heads = {row["id"]: row for row in rows if "model_name" in row}
    names = {number: head["model_name"] for number, head in heads.items()}
    seen: dict[str, Any] = {}
    for number, head in heads.items():
        stamps = [stamp for row in rows if row["id"] == number for stamp in row.get("timestamps", ())]
        kinds = sorted(stamp["name"] for stamp in stamps)
        seen.setdefault(names[number], []).append(
            {
                "keys": sorted(head),
                "version": head["model_version"],
                "parent": names.get(head.get("parent_id", -1), ""),
                "events": kinds,
                "are_times": all(re.fullmatch(r"\d+", str(stamp["ns"])) is not None for stamp in stamps),
            }
        )
    return seen


_FOUR = (1.0, 2.0, 3.0, 4.0)
_TRACED = {
    "a model": _TOLD,
    "a model with an id": Inference("told", (Input("INPUT0", "INT32", (1,), (1,)),), id="abc"),
    "an ensemble": Inference("ensemble", (Input("A", "FP32", (4,), _FOUR), Input("B", "FP32", (4,), _FOUR))),
}
_HEADERS: dict[str, dict[str, str]] = {
    "one": {"fw-color": "blue"},
    "several": {"fw-a": "1", "forwarded-b": "2", "other": "3"},
    "another case": {"FW-Color": "blue"},
    "within a name": {"my-fw-color": "blue"},
    "none": {"color": "blue"},
    "an empty one": {"fw-empty": ""},
}

FLAG_CASES = [
    *(
        Case(f"restricted: {method} {path} {how}", partial(_restricted_http, method, path, headers))
        for method, path, _ in _HTTP_CALLS
        for how, headers in _KEYS.items()
    ),
    *(
        Case(f"restricted: {name} {how}", partial(_restricted_rpc, name, message, metadata))
        for name, message in _RPCS
        for how, metadata in _KEYS.items()
    ),
    *(
        Case(f"forwarded: {how} ({form})", partial(_forwarded, form, headers))
        for how, headers in _HEADERS.items()
        for form in ("http", "grpc")
        if form == "http" or all(key == key.lower() for key in headers)
    ),
    *(Case(f"cache: {how}", partial(_grown, "cached", asked)) for how, asked in _CACHED.items()),
    Case("cache: families", _cache_families),
    Case(
        "limited: three",
        partial(
            _grown,
            "limited",
            tuple(Inference("limited", (Input("INPUT0", "FP32", (1, 1), (value,)),)) for value in (1.0, 2.0, 3.0)),
        ),
    ),
    *(Case(f"trace: {what}", partial(_traced, inference)) for what, inference in _TRACED.items()),
]

"""What both servers say about themselves and their models: health, metadata, config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message
from support.differential.facts import Case, http_facts, rpc_facts
from support.differential.models import LOADED
from support.differential.target import Target
from tritonclient.grpc import service_pb2

# Of models whose versions matter.
_VERSIONED = ("many_versions", "latest_two", "specific")
_UNKNOWN = (("nothing", ""), ("nothing", "1"), ("never", ""), ("echo", "7"), ("bad_initialize", ""), ("echo", "0"))


def get(path: str, *wanted: str) -> Callable[[Target], Any]:
    return lambda target: http_facts(target.http("GET", path), *wanted)


def call(name: str, message: Message, *wanted: str) -> Callable[[Target], Any]:
    return lambda target: rpc_facts(target.rpc(name, message), *wanted)


def _model_cases(model: str, version: str, *wanted: str) -> list[Case]:
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
    named = {"name": model, "version": version}
    label = f"{model}{' version ' + version if version else ''}"
    pairs: list[tuple[str, Callable[[Target], Any]]] = [
        ("http: metadata", get(path, *wanted)),
        ("grpc: metadata", call("ModelMetadata", service_pb2.ModelMetadataRequest(**named), *wanted)),
        ("http: ready", get(f"{path}/ready", *wanted)),
        ("grpc: ready", call("ModelReady", service_pb2.ModelReadyRequest(**named), *wanted)),
        ("http: config", get(f"{path}/config", *wanted)),
        ("grpc: config", call("ModelConfig", service_pb2.ModelConfigRequest(**named), *wanted)),
    ]
    return [Case(f"{what} of {label}", ask) for what, ask in pairs]


def _with_headers(method: str, path: str, target: Target) -> Any:
    reply = target.http(method, path)
    return {"status": reply.status, "is_empty": not reply.body, "type": reply.headers.get("content-type", "")}


_SERVER = [
    Case("server metadata (http)", get("/v2")),
    Case("server metadata (grpc)", call("ServerMetadata", service_pb2.ServerMetadataRequest())),
    Case("live (grpc)", call("ServerLive", service_pb2.ServerLiveRequest())),
    Case("grpc: ready", call("ServerReady", service_pb2.ServerReadyRequest())),
    *(
        Case(f"{method} {path}", partial(_with_headers, method, path))
        for method, path in (
            ("GET", "/v2/health/live"),
            ("GET", "/v2/health/ready"),
            ("GET", "/v2/models/echo/ready"),
            ("GET", "/v2/models/nothing/ready"),
            ("POST", "/v2/health/live"),
            ("POST", "/v2"),
            ("GET", "/v2/models/echo/infer"),
            ("DELETE", "/v2/models/echo"),
            ("GET", "/v2/repository/index"),
            ("GET", "/"),
            ("GET", "/v3"),
            ("GET", "/v2/"),
            ("GET", "/v2/models"),
            ("GET", "/v2/models/echo/nothing"),
            ("GET", "/v2/models/echo/versions/x"),
            ("GET", "/v2/models/echo/versions/1/2"),
            ("GET", "/v2/health"),
            ("GET", "/v2/models/echo?x=1"),
            ("GET", "/v2/models/ech%6f"),
        )
    ),
]

CASES = [
    *_SERVER,
    *(case for model in LOADED for case in _model_cases(model, "")),
    *(case for model in _VERSIONED for version in ("1", "2", "3") for case in _model_cases(model, version, "version")),
    *(case for model, version in _UNKNOWN for case in _model_cases(model, version, model, version or model)),
]

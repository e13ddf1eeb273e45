"""Groups of calls that need a header: every route and every method is in one, over both protocols."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.access import ApiGroup

KEY, METADATA_KEY = "admin-key", "triton-grpc-protocol-admin-key"
GUARDED = (
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    rules = (f"{','.join(GUARDED[:4])}:Admin-Key=s=ecret", f"{','.join(GUARDED[4:])}:Admin-Key=s=ecret")
    with running_server(root, http_restricted_api=rules, grpc_restricted_protocol=rules) as running:
        yield running


def _routes(served: RunningServer) -> list[tuple[str, str, ApiGroup]]:
    """Method, path and group of every route, read from a frontend of the kind that serves."""
    from modelserver.app.frontends import http_frontend

    server = served.server
    routes = http_frontend(server.dataplane, server.controlplane).routes
    paths = [route.pattern.replace("{name}", "echo").replace("{version}", "1") for route in routes]
    return [(route.method, re.sub("{.*?}", "x", path), route.group) for route, path in zip(routes, paths, strict=True)]


def test_every_route_is_refused_without_the_header_unless_it_is_of_health(served: RunningServer) -> None:
    seen = set()
    with httpx.Client(base_url=f"http://{served.http_url}") as client:
        for method, path, group in _routes(served):
            seen.add(group)
            answer = client.request(method, path)
            if group is ApiGroup.HEALTH:
                assert answer.status_code == 200, path
            else:
                assert answer.status_code == 403, path
                if method != "HEAD":
                    error = answer.json()["error"]  # an object in OpenAI's API
                    message = error if isinstance(error, str) else error["message"]
                    assert message == "This API is restricted, expecting header 'admin-key'"
            assert client.request(method, path, headers={KEY: "secret"}).status_code == answer.status_code
            allowed = client.request(method, path, headers={KEY: "s=ecret"})
            assert allowed.status_code != 403, path
    assert seen == set(ApiGroup)


def test_every_method_is_refused_without_the_key_unless_it_is_of_health(served: RunningServer) -> None:
    from modelserver.app.frontends import grpc_frontend

    async def methods() -> dict[str, Any]:
        return dict(grpc_frontend(served.server.dataplane, served.server.controlplane).methods)

    seen = set()
    with grpc.insecure_channel(served.grpc_url) as channel:
        for path, method in served.call(methods).items():
            group = method.group
            seen.add(group)
            for value, is_right in ((None, False), ("wrong", False), ("s=ecret", True)):
                metadata = [] if value is None else [(METADATA_KEY, value)]
                code, text = _ask(channel, path, metadata, is_stream=method.stream is not None)
                is_refused = code is grpc.StatusCode.UNAVAILABLE and "This protocol is restricted" in text
                assert is_refused == (group is not ApiGroup.HEALTH and not is_right), (path, value, code, text)
                if is_refused:
                    assert text == f"This protocol is restricted, expecting header '{METADATA_KEY}'"
    assert seen == set(ApiGroup)


def _ask(channel: grpc.Channel, path: str, metadata: list[tuple[str, str]], *, is_stream: bool) -> tuple[Any, str]:
    """The status of a call with an empty message; of a stream, with none."""
    if path.endswith("/Watch"):
        return grpc.StatusCode.OK, ""  # it never ends, and belongs to health
    try:
        if is_stream:
            list(channel.stream_stream(path)(iter(()), metadata=metadata, timeout=10))
        else:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_known_requests_are_looked_at_each_time(served: RunningServer) -> None:
    document = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    with httpx.Client(base_url=f"http://{served.http_url}") as client:
        for value, status in (("s=ecret", 200), ("no", 403), ("s=ecret", 200), ("", 403)):
            answer = client.post("/v2/models/echo/infer", json=document, headers={KEY: value})
            assert answer.status_code == status

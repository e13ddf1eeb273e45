"""API keys in every layout of the server: what is open, what needs which scope, and whose model is whose."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.keys import KeyFile
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import SCOPES, Scope
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.api import Route

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
HEALTH = "/grpc.health.v1.Health"
DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    for scope in SCOPES:
        file.add(scope.value, scope)
    file.add("tenant", *SCOPES, models=("echo*",))
    file.add("everything", *SCOPES)
    return file


@pytest.fixture(scope="module")
def served(layout: str, keys: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    for name in ("echo", "other"):
        write_identity(root, name)
    options: dict[str, Any] = {
        "model_control_mode": "explicit",
        "load_model": ("*",),
        "allow_client_shm": True,
        "http_header_forward_pattern": ".*",
    }
    with running_server(root, api_keys_file=str(keys.path), **options) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}") as client:
        yield client


@pytest.fixture
def channel(served: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.grpc_url) as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Beginnings of paths, whose errors have a form of their own.
TGI = ("/generate", "/chat_tokenize", "/info")
LLAMACPP = (
    "/completion",
    "/infill",
    "/apply-template",
    "/embedding",
    "/props",
    "/lora-adapters",
    "/slots",
    "/reranking",
)


def _routes(served: RunningServer) -> list[tuple[Route, str]]:
    """Every route, and a path of it, route, read from a frontend of the kind that serves."""
    from modelserver.app.frontends import http_frontend

    routes = http_frontend(served.server.dataplane, served.server.controlplane).routes
    # A model that there is not: nothing is loaded or unloaded by the walk.
    return [(route, re.sub("{.*?}", "x", route.pattern.replace("{version}", "1"))) for route in routes]


def test_every_route_needs_a_key_of_its_scope_but_liveness_and_readiness(
    served: RunningServer, keys: KeyFile, http: httpx.Client
) -> None:
    still_open, scopes = set(), set()
    for route, path in _routes(served):
        method = route.method
        answer = http.request(method, path)
        if answer.status_code != 401:
            assert answer.status_code == 200, path
            still_open.add(route.pattern)
            continue
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"] if method != "HEAD" else None
        if error is None:
            assert not answer.content, path
        elif path.startswith("/v2/rerank"):  # Cohere's path, OpenAI's form
            assert error["code"] == "invalid_api_key"
        elif path.startswith(("/v2", "/api", *TGI)) or path.endswith(":predict"):
            assert isinstance(error, str), path
        elif path.startswith(("/v1/messages", *LLAMACPP)):
            assert error["type"] == "authentication_error"
        else:
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert http.request(method, path, headers=bearer("msk_wrong")).status_code == 401
        needed = route.needs.scope
        scopes.add(needed)
        for scope in SCOPES:
            status = http.request(method, path, headers=bearer(keys.texts[scope.value])).status_code
            assert (status == 403) == (scope is not needed), (path, scope, status)
            assert status != 401, path
    pages = {pattern for pattern in still_open if pattern.startswith("/console")}  # files without secrets
    assert still_open - pages == {"/", "/v2/health/live", "/v2/health/ready", "/health", "/ping"}
    assert scopes == set(SCOPES)
    for path in ("/v3", "/v2/models/echo/nothing", "/v1/nothing"):
        assert http.get(path).status_code == 401
        assert http.get(path, headers=bearer(keys.texts["metrics"])).status_code == 404


def test_every_method_needs_a_key_of_its_scope_but_liveness_and_readiness(
    served: RunningServer, keys: KeyFile, channel: grpc.Channel
) -> None:
    from modelserver.app.frontends import grpc_frontend

    async def methods() -> dict[str, Any]:
        return dict(grpc_frontend(served.server.dataplane, served.server.controlplane).methods)

    still_open = set()
    for path, method in served.call(methods).items():
        is_stream = method.stream is not None
        code = _ask(channel, path, None, is_stream=is_stream)
        if code is not grpc.StatusCode.UNAUTHENTICATED:
            still_open.add(path.rpartition("/")[2])
        else:
            assert _ask(channel, path, "msk_wrong", is_stream=is_stream) is grpc.StatusCode.UNAUTHENTICATED
        needed = method.needs.scope
        for scope in SCOPES:
            code = _ask(channel, path, keys.texts[scope.value], is_stream=is_stream)
            is_denied = scope is not needed and not path.endswith(("/ServerLive", "/ServerReady"))
            assert (code is grpc.StatusCode.PERMISSION_DENIED) == is_denied, (path, scope, code)
            assert code is not grpc.StatusCode.UNAUTHENTICATED, path
    assert still_open == {"ServerLive", "ServerReady", "Check", "Watch"}


def _ask(channel: grpc.Channel, path: str, key: str | None, *, is_stream: bool) -> Any:
    """The status of a call with an empty message; of a stream, with none."""
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    try:
        if is_stream:
            list(channel.stream_stream(path)(iter(()), metadata=metadata, timeout=10))
        else:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_port_of_the_metrics_needs_the_scope(served: RunningServer, keys: KeyFile) -> None:
    for path, of_another, status in (("/metrics", 403, 200), ("/", 404, 404)):
        url = f"http://{served.metrics_url}{path}"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=bearer(keys.texts["infer"])).status_code == of_another
        assert httpx.get(url, headers=bearer(keys.texts["metrics"])).status_code == status


def test_a_key_of_some_models_is_for_no_other_over_http(keys: KeyFile, http: httpx.Client) -> None:
    tenant = bearer(keys.texts["tenant"])
    for _ in range(2):  # the second is a head that is known
        assert http.post("/v2/models/echo/infer", json=DOCUMENT, headers=tenant).status_code == 200
        assert http.post("/v2/models/other/infer", json=DOCUMENT, headers=tenant).status_code == 403
    unknown = http.get("/v2/models/none/config", headers=tenant)
    assert unknown.status_code == 403, "a key does not find out which other models there are"
    body = gzip.compress(json.dumps({**DOCUMENT, "parameters": {"pad": "x" * 90_000}}).encode(), 0)
    for name, status in (("echo", 200), ("other", 403)):
        headers = {**tenant, "Content-Encoding": "gzip"}
        assert http.post(f"/v2/models/{name}/infer", content=body, headers=headers).status_code == status
    for path in ("", "/config", "/ready", "/stats", "/versions/1", "/trace/setting"):
        assert http.get(f"/v2/models/echo{path}", headers=tenant).status_code == 200, path
        assert http.get(f"/v2/models/other{path}", headers=tenant).status_code == 403, path
    assert http.get("/v2/models", headers=tenant).json() == {"models": ["echo"]}
    assert {row["name"] for row in http.post("/v2/repository/index", headers=tenant).json()} == {"echo"}
    assert {row["name"] for row in http.get("/v2/models/stats", headers=tenant).json()["model_stats"]} == {"echo"}
    assert http.post("/v2/repository/models/other/unload", headers=tenant).status_code == 403
    assert http.post("/v2/repository/models/echo/load", headers=tenant).status_code == 200
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status"):
        assert http.get(path, headers=tenant).status_code == 403, path
        assert http.get(path, headers=bearer(keys.texts["everything"])).status_code == 200, path
    chat = http.post("/v1/chat/completions", json={"model": "other", "messages": []}, headers=tenant)
    assert chat.status_code == 403
    assert chat.json()["error"]["code"] == "permission_denied"


def test_a_key_of_some_models_is_for_no_other_over_grpc(keys: KeyFile, channel: grpc.Channel) -> None:
    metadata = [("x-api-key", keys.texts["tenant"])]
    assert _infer(channel, "echo", metadata) is grpc.StatusCode.OK
    assert _infer(channel, "other", metadata) is grpc.StatusCode.PERMISSION_DENIED
    replies = channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)(
        iter([_message("echo"), _message("other")]), metadata=metadata, timeout=10
    )
    first, second = list(replies)
    assert first.error_message == ""
    assert "'tenant' is not for model 'other'" in second.error_message


def test_health_over_grpc_tells_of_models_to_those_who_may_ask(keys: KeyFile, channel: grpc.Channel) -> None:
    check = channel.unary_unary(f"{HEALTH}/Check")
    assert check(b"", timeout=10) == b"\x08\x01"
    by_name = b"\x0a\x04echo"
    assert check(by_name, metadata=[("x-api-key", keys.texts["infer"])], timeout=10) == b"\x08\x01"
    with pytest.raises(grpc.RpcError) as error:
        check(by_name, timeout=10)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def _message(model: str) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 1])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[b"\0" * 4]).SerializeToString()


def _infer(channel: grpc.Channel, model: str, metadata: list[tuple[str, str]]) -> Any:
    try:
        channel.unary_unary(INFER)(_message(model), metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_a_key_that_is_taken_back_is_refused_on_connections_that_are_open(
    served: RunningServer, keys: KeyFile, http: httpx.Client, channel: grpc.Channel
) -> None:
    text = keys.add("leaver", Scope.INFER)
    metadata = [("x-api-key", text)]

    def both() -> tuple[int, Any]:
        status = http.post("/v2/models/echo/infer", json=DOCUMENT, headers={"x-api-key": text}).status_code
        return status, _infer(channel, "echo", metadata)

    _until(lambda: both() == (200, grpc.StatusCode.OK))
    keys.remove("leaver")
    _until(lambda: both() == (401, grpc.StatusCode.UNAUTHENTICATED))


def _until(holds: Any) -> None:
    import time

    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, "the new file was not taken"
        time.sleep(0.05)


def test_no_key_is_in_a_log_line_an_error_or_a_parameter_and_admin_actions_are_audited(
    keys: KeyFile, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_identity(tmp_path, "echo")
    options: dict[str, Any] = {"model_control_mode": "explicit", "log_verbose": 2, "allow_client_shm": True}
    texts = list(keys.texts.values())
    answers = []
    with (
        caplog.at_level(logging.DEBUG),
        running_server(tmp_path, api_keys_file=str(keys.path), **options) as served,
        httpx.Client(base_url=f"http://{served.http_url}") as http,
        grpc.insecure_channel(served.grpc_url) as channel,
    ):
        admin = bearer(keys.texts["admin"])
        answers += [
            http.post("/v2/repository/models/echo/load", headers=admin),
            http.post("/v2/repository/models/none/load", headers=admin),
            http.post("/v2/repository/models/other/unload", headers=bearer(keys.texts["tenant"])),
            http.post("/v2/repository/models/echo/unload", headers=bearer(keys.texts["infer"])),
            http.post("/v2/logging", json={"log_verbose_level": 3}, headers=admin),
            http.post("/v2/trace/setting", json={"trace_rate": "7"}, headers=admin),
            http.post("/v2/systemsharedmemory/region/r/register", json={"key": "/no", "byte_size": 1}, headers=admin),
            http.get("/v2/models/echo", headers=bearer(keys.texts["infer"] + "x")),
        ]
        metadata = [("x-api-key", keys.texts["admin"])]
        unload = pb.RepositoryModelUnloadRequest(model_name="echo").SerializeToString()
        channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")(unload, metadata=metadata)
    written = caplog.text + "".join(answer.text for answer in answers)
    assert not any(text in written or text[13:] in written for text in texts)
    lines = [record.getMessage() for record in caplog.records if record.name == "modelserver.audit"]
    assert all(re.search(r" peer=127\.0\.0\.1:\d+ ", line) for line in lines), lines
    found = [re.sub(r" peer=\S+", "", line).removeprefix("audit: key=") for line in lines]
    assert found == [
        '"admin" action="load" target="echo" result=ok',
        '"admin" action="load" target="none" result=not_found',
        '"tenant" action="unload" target="other" result=permission_denied',
        '"infer" action="POST /v2/repository/models/echo/unload" target="" result=permission_denied',
        '"admin" action="log settings" target="log_verbose_level" result=ok',
        '"admin" action="trace settings" target="" result=ok',
        '"admin" action="register shared memory" target="r" result=invalid_argument',
        '"admin" action="unload" target="echo" result=ok',
    ]

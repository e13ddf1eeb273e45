"""Every route and RPC with API keys, for a model in each state: none fails for a reason of our own.

The calls come from the frontends' own tables, so that a new one cannot be missed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.keys import KeyFile
from support.latches import write_latched
from support.mock_llm import write_mock_llm
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.app.frontends import grpc_frontend, http_frontend
from modelserver.app.ports import SAGEMAKER
from modelserver.auth.access import Access
from modelserver.auth.api_keys import SCOPES
from modelserver.auth.guard import Guard
from modelserver.frontends.http.clouds import sagemaker_api
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.api import Route
from modelserver.protocol.kserve import SERVICE
from modelserver.protocol.limits import HttpLimits

STATES = ("never_loaded", "ready", "generates", "unloaded", "failed", "loading", "unloading", "infer")
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
# Of a load that another test holds, these would wait for its end.
_CONTROL = re.compile(r"/(load|unload)$|Repository")
_OURS = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    file.add("everything", *SCOPES)
    file.add("tenant", *SCOPES, models=("no_*",))
    return file


@pytest.fixture(scope="module")
def served(layout: str, keys: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its models are in the states that they are named after."""
    root: Path = tmp_path_factory.mktemp("states")
    for name in ("never_loaded", "ready", "unloaded", "failed"):
        write_identity(root, name)
    (root / "failed" / "config.pbtxt").write_text('backend: "none_of_that_name"')
    write_mock_llm(root, "generates")
    latch = write_latched(root, "loading", held="load")
    batch_latch = write_latched(root, "unloading", held="batch")
    options: dict[str, Any] = {
        "model_control_mode": "explicit",
        "backend_directory": (str(Path(__file__).parents[1] / "support" / "backends"),),
        "load_model": ("ready", "generates", "unloaded", "unloading", "failed"),
        "allow_client_shm": True,
        "allow_sagemaker": True,
        "sagemaker_port": 0,
    }
    with (
        running_server(root, api_keys_file=str(keys.path), **options) as running,
        httpx.Client(base_url=f"http://{running.http_url}", headers=_bearer(keys, "everything")) as client,
    ):
        assert client.post("/v2/repository/models/unloaded/unload").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v2/repository/models/loading/load", timeout=0.3)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v2/models/unloading/infer", json={"inputs": [TENSOR]}, timeout=0.3)
        assert client.post("/v2/repository/models/unloading/unload").status_code == 200
        index = client.post("/v2/repository/index").json()
        assert {"UNLOADING", "LOADING"} <= {entry.get("state") for entry in index}
        yield running
        latch.open()
        batch_latch.open()


@pytest.fixture(scope="module")
def lazy(layout: str, keys: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its model is unloaded again at once."""
    root: Path = tmp_path_factory.mktemp("lazy")
    write_identity(root, "unloaded", more='parameters { key: "keep_alive" value { string_value: "0" } }')
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_on_demand": True, "allow_client_shm": True}
    with running_server(root, api_keys_file=str(keys.path), **options) as running:
        yield running


def _bearer(keys: KeyFile, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {keys.texts[name]}"}


@pytest.mark.parametrize("key", ["everything", "tenant"])
@pytest.mark.parametrize("state", STATES)
def test_no_route_fails(served: RunningServer, keys: KeyFile, state: str, key: str) -> None:
    _walk_routes(served, _bearer(keys, key), state)


@pytest.mark.parametrize("key", ["everything", "tenant"])
def test_no_route_fails_for_a_model_that_is_asleep(lazy: RunningServer, keys: KeyFile, key: str) -> None:
    _walk_routes(lazy, _bearer(keys, key), "unloaded")


@pytest.mark.parametrize("key", ["everything", "tenant"])
@pytest.mark.parametrize("state", STATES)
def test_no_route_of_a_cloud_fails(served: RunningServer, keys: KeyFile, state: str, key: str) -> None:
    planes = served.server.dataplane, served.server.controlplane
    v2, guard = http_frontend(*planes).apis[0], Guard(Access())
    api = sagemaker_api(v2, guard, *planes, HttpLimits(), model="", inference_type="infer", port=0)
    url = f"http://127.0.0.1:{served.server.port_of(SAGEMAKER)}"
    _walk(api.routes, url, _bearer(keys, key), state)


@pytest.mark.parametrize("key", ["everything", "tenant"])
@pytest.mark.parametrize("state", STATES)
def test_no_method_fails(served: RunningServer, keys: KeyFile, state: str, key: str) -> None:
    _walk_methods(served, keys.texts[key], state)


@pytest.mark.parametrize("key", ["everything", "tenant"])
def test_no_method_fails_for_a_model_that_is_asleep(lazy: RunningServer, keys: KeyFile, key: str) -> None:
    _walk_methods(lazy, keys.texts[key], "unloaded")


def _walk_routes(served: RunningServer, headers: dict[str, str], state: str) -> None:
    server = served.server
    routes = http_frontend(server.dataplane, server.controlplane).routes
    _walk(routes, f"http://{served.http_url}", headers, state)


def _walk(routes: Sequence[Route], url: str, headers: dict[str, str], state: str) -> None:
    prompt = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], "text_input": "x"}
    bodies: tuple[dict[str, Any], ...] = ({}, {"model": state, **prompt, "inputs": [TENSOR]})
    failures = []
    with httpx.Client(base_url=url, headers=headers, timeout=20) as client:
        # Control comes last: it may change the state.
        for route in sorted(routes, key=lambda route: bool(_CONTROL.search(route.pattern))):
            if state in ("loading", "unloading") and _CONTROL.search(route.pattern):
                continue
            path = re.sub("{(name|id)}", state, route.pattern).replace("{version}", "1")
            path = re.sub("{.*?}", "x", path)
            for body in bodies if route.method == "POST" else bodies[:1]:
                content = {"json": body} if body else {}
                with client.stream(route.method, path, **content) as answer:  # one of them does not end
                    if answer.status_code >= 500 and not _is_deliberate(answer, route.pattern):
                        failures.append((route.method, path, answer.status_code, answer.read()))
    assert not failures


def _is_deliberate(answer: httpx.Response, pattern: str) -> bool:
    """503 says why, and a failure of our own where to look. Repositories have no names here, and llama.cpp's server has
    calls that are refused."""
    if answer.status_code == 501:
        text = answer.read()
        if "{repository}" in pattern:
            return b"not supported without --model-namespacing" in text
        return b"This server does not support this call: " in text
    return answer.status_code == 503 and b"internal error" not in answer.read()


def _walk_methods(served: RunningServer, key: str, state: str) -> None:
    server = served.server

    async def methods() -> dict[str, bool]:
        found = grpc_frontend(server.dataplane, server.controlplane).methods
        return {path: method.stream is not None for path, method in found.items()}

    failures = []
    with grpc.insecure_channel(served.grpc_url) as channel:
        for path, is_stream in sorted(served.call(methods).items(), key=lambda item: bool(_CONTROL.search(item[0]))):
            if state in ("loading", "unloading") and _CONTROL.search(path):
                continue
            for message in _messages(path, state):
                error = _ask(channel, path, key, message, is_stream=is_stream)
                if error is not None and error.code() in _OURS:
                    failures.append((path, error.code(), error.details()))
    assert not failures


def _messages(path: str, state: str) -> list[bytes]:
    """Of each call an empty message, and one that names the model."""
    service, _, method = path.removeprefix("/").partition("/")
    if service != SERVICE:
        return [b"", b"\x0a" + bytes((len(state),)) + state.encode()]
    name = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method].input_type.name
    message = getattr(pb, name)()
    for field in ("name", "model_name"):
        if field in message.DESCRIPTOR.fields_by_name:
            setattr(message, field, state)
    if isinstance(message, pb.ModelInferRequest):
        tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 1])
        message.inputs.append(tensor)
        message.raw_input_contents.append(b"\0" * 4)
    return [b"", message.SerializeToString()]


def _ask(channel: grpc.Channel, path: str, key: str, message: bytes, *, is_stream: bool) -> Any:
    """The error of the call, if there is one; a stream that goes on is left."""
    metadata = [("authorization", f"Bearer {key}")]
    try:
        if is_stream:
            call = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=10)
            with contextlib.suppress(StopIteration):
                next(call)
            call.cancel()
        else:
            channel.unary_unary(path)(message, metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        return error
    return None

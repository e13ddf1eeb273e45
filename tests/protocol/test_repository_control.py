"""Loading and unloading on request, the same over both protocols: overrides, versions, failures, names."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from support.async_clients import AsyncClient, AsyncGrpcClient, AsyncHttpClient
from support.clients import ClientError, HttpClient, ProtocolClient
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.latches import write_latched
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server
from support.waiting import until_true
from tritonclient.utils import InferenceServerException

from modelserver.errors import ErrorCode
from modelserver.pb import grpc_service_pb2 as pb

pytestmark = pytest.mark.one_layout

ADD = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", data + {added})]))
        return answers
"""
FAILS = """
    def initialize(self, args):
        raise ValueError("the weights are missing")
"""
ADD_CONFIG = {
    "backend": "python",
    "max_batch_size": 8,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one model."""
    repository = tmp_path / "models"
    write_identity(repository, "echo", versions=(1, 2))
    return repository


@pytest.fixture
def explicit(root: Path) -> Iterator[RunningServer]:
    with running_server(
        root, model_control_mode="explicit", load_model=("echo",), backend_directory=(BACKEND_DIRECTORY,)
    ) as running:
        yield running


@pytest.fixture
def control(protocol: type[ProtocolClient], explicit: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(explicit) as connected:
        yield connected


def _infer(client: ProtocolClient, model: str = "echo", **details: Any) -> tuple[float, str]:
    """What the model makes of a 1, and which version did it."""
    answer = client.infer(model, {"INPUT0": np.ones((1, 1), np.float32)}, **details)
    return answer["OUTPUT0"].item(), answer.model_version


def _rows(client: ProtocolClient) -> dict[tuple[str, str], tuple[str, str]]:
    return {
        (row["name"], row.get("version", "")): (row.get("state", ""), row.get("reason", "")) for row in client.index()
    }


def _refused(call: Any, *arguments: Any, **details: Any) -> ClientError:
    with pytest.raises(ClientError) as refused:
        call(*arguments, **details)
    return refused.value


def _unload(client: ProtocolClient, model: str) -> None:
    """Return when the last version has gone: an unload is answered before."""
    client.unload(model)
    while any(state == "UNLOADING" for (name, _), (state, _) in _rows(client).items() if name == model):
        continue


def test_load_and_unload(control: ProtocolClient, root: Path) -> None:
    write_identity(root, "later")
    assert _rows(control)["later", ""] == ("", "")
    assert _refused(_infer, control, "later").code is ErrorCode.NOT_FOUND

    control.load("later")
    assert _infer(control, "later") == (1, "1")
    assert control.is_model_ready("later")
    assert _rows(control)["later", "1"] == ("READY", "")

    _unload(control, "later")
    refused = _refused(_infer, control, "later")
    assert (refused.code, "no available versions" in refused.message) == (ErrorCode.NOT_FOUND, True)
    assert not control.is_model_ready("later")
    assert control.is_ready()
    control.load("later")
    assert _infer(control, "later") == (1, "1")


def test_an_unloaded_model_stays_in_the_index(control: ProtocolClient) -> None:
    _unload(control, "echo")
    # Version 1 was there and never loaded: the policy serves the latest.
    assert _rows(control)["echo", "2"] == ("UNAVAILABLE", "unloaded")


# What clients ask of a model, over both protocols. Health and trace settings answer of models that do not serve.
_QUESTIONS: dict[str, Callable[[ProtocolClient, str], Any]] = {
    "infer": lambda client, version: _infer(client, version=version),
    "metadata": lambda client, version: client.model_metadata("echo", version),
    "config": lambda client, version: client.model_config("echo", version),
    "statistics": lambda client, version: client.statistics("echo", version),
}


@pytest.mark.parametrize("version", ["", "2"])
def test_an_unloaded_model_is_missing_until_it_is_loaded_again(control: ProtocolClient, version: str) -> None:
    """Proxies and clients retry UNAVAILABLE, which would not help here."""
    _unload(control, "echo")
    for what, ask in _QUESTIONS.items():
        refused = _refused(ask, control, version)
        assert refused.code is ErrorCode.NOT_FOUND
        # Triton has a sentence of its own for statistics.
        begin = "requested model " if what == "statistics" else "Request for unknown model: 'echo'"
        assert refused.message.startswith(begin)
        assert "version 2 is UNAVAILABLE (unloaded)" in refused.message
    assert not control.is_model_ready("echo", version)
    control.load("echo")
    for ask in _QUESTIONS.values():
        ask(control, version)


@pytest.mark.parametrize("version", ["", "2"])
def test_a_model_that_failed_to_load_is_unavailable(control: ProtocolClient, version: str) -> None:
    _unload(control, "echo")
    files = {"file:2/model.py": f"{ADD.format(added=1)}{FAILS}".encode()}
    _refused(control.load, "echo", config=json.dumps(ADD_CONFIG), files=files)
    for ask in _QUESTIONS.values():
        assert _refused(ask, control, version).code is ErrorCode.UNAVAILABLE


def test_every_route_of_an_unloaded_model_says_that_it_is_missing(explicit: RunningServer) -> None:
    with HttpClient(explicit) as client:
        _unload(client, "echo")
    chat = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    calls = [
        *(
            ("POST", f"/v2/models/echo{version}/{verb}", {"INPUT0": 1})
            for version in ("", "/versions/2")
            for verb in ("generate", "generate_stream")
        ),
        *(("POST", f"/v1/{route}", chat) for route in ("chat/completions", "completions", "embeddings")),
        ("GET", "/v1/models/echo", None),
        ("POST", "/models/echo/invoke", {"inputs": []}),
    ]
    statuses = {
        f"{method} {path}": httpx.request(method, f"http://{explicit.http_url}{path}", json=body).status_code
        for method, path, body in calls
    }
    assert set(statuses.values()) == {404}, statuses


def test_a_model_that_waits_to_be_loaded_is_said_to_be_there(control: ProtocolClient, root: Path) -> None:
    """Not that another model may be meant, whose name is like it."""
    write_identity(root, "echa")
    _rows(control)  # looks at the disk
    refused = _refused(_infer, control, "echa")
    assert refused.code is ErrorCode.NOT_FOUND
    assert refused.message.startswith("Request for unknown model: 'echa' is not found; it is in the repository")
    assert _refused(_infer, control, "ech").message.endswith("did you mean 'echo'?")


def test_unloading_what_is_not_loaded_is_no_error(control: ProtocolClient) -> None:
    control.unload("nobody")
    control.unload("echo", unload_dependents=True)
    control.unload("echo")


def test_loading_what_is_not_there(control: ProtocolClient) -> None:
    refused = _refused(control.load, "ecco")
    assert refused.code is ErrorCode.NOT_FOUND
    assert "ecco" in refused.message
    assert ("ecco", "") not in _rows(control)


def test_loading_again_takes_new_files(control: ProtocolClient, root: Path) -> None:
    assert _infer(control) == (1, "2")
    (root / "echo" / "3").mkdir()
    assert _infer(control) == (1, "2")
    control.load("echo")
    assert _infer(control) == (1, "3")
    shutil.rmtree(root / "echo" / "3")
    control.load("echo")
    assert _infer(control) == (1, "2")
    assert control.model_metadata("echo")["versions"] == ["2"]


def test_a_config_override_replaces_the_file(control: ProtocolClient, root: Path) -> None:
    config = control.model_config("echo") | {"max_batch_size": 3, "version_policy": {"all": {}}}
    control.load("echo", config=json.dumps(config))
    assert control.model_config("echo")["max_batch_size"] == 3
    assert control.model_metadata("echo")["versions"] == ["1", "2"]
    assert _infer(control, version="1") == (1, "1")
    control.load("echo")  # as in Triton the override stays
    assert control.model_config("echo")["max_batch_size"] == 3
    os.utime(root / "echo" / "config.pbtxt")
    control.load("echo")
    assert control.model_config("echo")["max_batch_size"] == 8
    assert _refused(_infer, control, version="1").code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "config"),
        ("[]", "config"),
        ('{"backend": "identity", "max_batch_sizes": 4}', "max_batch_size"),
        ('{"backend": "identity", "max_batch_size": -1}', "max_batch_size"),
        ('{"name": "other", "backend": "identity"}', "name"),
    ],
)
def test_a_config_that_is_wrong_is_refused_and_changes_nothing(control: ProtocolClient, config: str, told: str) -> None:
    refused = _refused(control.load, "echo", config=config)
    assert refused.code is ErrorCode.INVALID_ARGUMENT
    assert told in refused.message
    assert _infer(control) == (1, "2")
    state, reason = _rows(control)["echo", "2"]
    assert state == "READY"
    assert told in reason
    control.load("echo")
    assert _rows(control)["echo", "2"] == ("READY", "")


def test_file_overrides_make_a_model_of_their_own(control: ProtocolClient, root: Path) -> None:
    files = {"file:7/model.py": ADD.format(added=10).encode()}
    control.load("sent", config=json.dumps(ADD_CONFIG), files=files)
    assert _infer(control, "sent") == (11, "7")
    assert not (root / "sent").exists()

    files = {"file:8/model.py": ADD.format(added=20).encode()}
    control.load("sent", config=json.dumps(ADD_CONFIG), files=files)
    assert _infer(control, "sent") == (21, "8")
    assert _refused(_infer, control, "sent", version="7").code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)
    control.unload("sent")


def test_file_overrides_hide_what_is_on_disk(control: ProtocolClient) -> None:
    files = {"file:5/model.py": ADD.format(added=1).encode()}
    control.load("echo", config=json.dumps(ADD_CONFIG), files=files)
    assert _infer(control) == (2, "5")
    control.load("echo")
    assert _infer(control) == (1, "2")


@pytest.mark.parametrize(
    "path",
    ["../../evil/1/model.py", "1/../../evil.py", "/etc/evil", "", "/", "1/\\..\\evil", "/../1/evil.py"],
)
def test_file_overrides_stay_inside(control: ProtocolClient, root: Path, path: str) -> None:
    refused = _refused(control.load, "sent", config=json.dumps(ADD_CONFIG), files={f"file:{path}": b"x"})
    assert refused.code is ErrorCode.INVALID_ARGUMENT
    assert not list(root.parent.rglob("evil*"))


@pytest.mark.parametrize("path", ["1/" + "x" * 256, "x" * 256 + "/model.py", "1/" + "é" * 128, "1" + "/sub" * 600])
def test_file_overrides_have_names_that_files_can_have(control: ProtocolClient, path: str) -> None:
    refused = _refused(control.load, "sent", config=json.dumps(ADD_CONFIG), files={f"file:{path}": b"x"})
    assert refused.code is ErrorCode.INVALID_ARGUMENT
    assert "255" in refused.message


@pytest.mark.parametrize("path", ["/1/model.py", "1//model.py", "./1/model.py", "//1/./model.py"])
def test_paths_of_file_overrides_begin_at_the_model(control: ProtocolClient, path: str) -> None:
    files = {f"file:{path}": ADD.format(added=1).encode()}
    control.load("sent", config=json.dumps(ADD_CONFIG), files=files)
    assert _infer(control, "sent") == (2, "1")


def test_two_overrides_of_one_file_are_refused(control: ProtocolClient) -> None:
    source = ADD.format(added=1).encode()
    files = {"file:/1/model.py": source, "file:1/model.py": source}
    refused = _refused(control.load, "sent", config=json.dumps(ADD_CONFIG), files=files)
    assert (refused.code, "there are two of the file '1/model.py'" in refused.message) == (
        ErrorCode.INVALID_ARGUMENT,
        True,
    )


def test_file_overrides_need_a_config(explicit: RunningServer) -> None:
    content = base64.b64encode(b"x").decode()
    status, text = _post(explicit, "sent/load", {"parameters": {"file:1/model.py": content}})
    assert status == 400
    assert "config" in text


def _post(server: RunningServer, path: str, document: object) -> tuple[int, str]:
    answer = httpx.post(f"http://{server.http_url}/v2/repository/models/{path}", json=document)
    return answer.status_code, answer.json().get("error", "")


@pytest.mark.parametrize(
    ("path", "parameters", "told"),
    [
        ("echo/load", {"colour": "blue"}, "colour"),
        ("echo/load", {"config": 7}, "config"),
        ("echo/load", {"config": "{}", "file:1/x": "not base64!"}, "file:1/x"),
        ("echo/load", {"config": '{"max_batch_size": 1,\n"max_batch_size": 2}'}, "line 2: the field 'max_batch_size'"),
        ("echo/unload", {"unload_dependants": True}, "unload_dependants"),
        ("echo/unload", {"unload_dependents": "yes"}, "unload_dependents"),
    ],
)
def test_wrong_parameters_are_named(explicit: RunningServer, path: str, parameters: dict[str, Any], told: str) -> None:
    status, text = _post(explicit, path, {"parameters": parameters})
    assert status == 400
    assert told in text
    with HttpClient(explicit) as client:
        assert _infer(client) == (1, "2")


@pytest.mark.parametrize("name", ["..", "../models/echo", ".hidden", "a b", "\t", "echo/../echo", "x" * 300, "a\x00b"])
def test_names_that_no_model_has_are_refused(
    protocol: type[ProtocolClient], explicit: RunningServer, name: str
) -> None:
    with protocol(explicit) as client:
        for call in (client.load, client.unload):
            refused = _refused(call, name)
            assert refused.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND)


def test_a_load_that_fails_leaves_the_old_version_serving(control: ProtocolClient, root: Path) -> None:
    model = root / "code"
    write_model(root, "code", "", versions=(1,))
    (model / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8\n'
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
    )
    (model / "1" / "model.py").write_text(ADD.format(added=10))
    control.load("code")
    assert _infer(control, "code") == (11, "1")

    (model / "2").mkdir()
    (model / "2" / "model.py").write_text(ADD.format(added=20) + FAILS)
    refused = _refused(control.load, "code")
    assert refused.code is ErrorCode.INVALID_ARGUMENT
    assert "load failed for model 'code'" in refused.message
    assert "version 2 is at UNAVAILABLE state" in refused.message
    assert "the weights are missing" in refused.message
    assert _infer(control, "code") == (11, "1")
    rows = _rows(control)
    assert rows["code", "1"][0] == "READY"
    assert rows["code", "2"][0] == "UNAVAILABLE"
    assert "the weights are missing" in rows["code", "2"][1]

    (model / "2" / "model.py").write_text(ADD.format(added=20))
    control.load("code")
    assert _infer(control, "code") == (21, "2")
    assert _rows(control)["code", "2"] == ("READY", "")


def test_a_first_load_that_fails_says_why(control: ProtocolClient, root: Path) -> None:
    write_model(root, "broken", 'backend: "nothing"\n')
    refused = _refused(control.load, "broken")
    assert "nothing" in refused.message
    state, reason = _rows(control)["broken", ""]
    assert (state, "nothing" in reason) == ("UNAVAILABLE", True)
    answer = _refused(_infer, control, "broken")
    assert (answer.code, "nothing" in answer.message) == (ErrorCode.UNAVAILABLE, True)


@pytest.mark.parametrize("files", [{}, {"model.py": "raise ValueError('boom')"}], ids=["no file", "broken file"])
def test_a_version_that_cannot_be_loaded_has_a_row(control: ProtocolClient, root: Path, files: dict[str, str]) -> None:
    write_model(root, "code", "", versions=(1, 2))
    config = ADD_CONFIG | {"version_policy": {"all": {}}}
    (root / "code" / "1" / "model.py").write_text(ADD.format(added=10))
    for name, text in files.items():
        (root / "code" / "2" / name).write_text(text)
    refused = _refused(control.load, "code", config=json.dumps(config))
    assert refused.code is ErrorCode.INVALID_ARGUMENT
    assert "load failed for model 'code': " in refused.message
    reason = "boom" if files else "model.py"
    assert reason in refused.message.split("version 2 is at UNAVAILABLE state: ")[1]
    rows = _rows(control)
    assert ("code", "") not in rows
    assert {rows["code", version][0] for version in ("1", "2")} == {"UNAVAILABLE"}
    assert reason in rows["code", "2"][1]

    (root / "code" / "2" / "model.py").write_text(ADD.format(added=20))
    control.load("code", config=json.dumps(config))
    assert (_infer(control, "code"), _infer(control, "code", version="1")) == ((21, "2"), (11, "1"))
    assert {_rows(control)["code", version] for version in ("1", "2")} == {("READY", "")}


def test_dynamic_batching_without_batches_executes_each_request_alone(control: ProtocolClient) -> None:
    config = ADD_CONFIG | {"max_batch_size": 0, "dynamic_batching": {}, "version_policy": {"all": {}}}
    files = {"file:1/model.py": ADD.format(added=10).encode()}
    control.load("code", config=json.dumps(config), files=files)
    answer = control.infer("code", {"INPUT0": np.ones(3, np.float32)})
    assert answer["OUTPUT0"].tolist() == [11, 11, 11]
    told = control.model_config("code")
    assert (told.get("max_batch_size", 0), told["default_model_filename"]) == (0, "model.py")
    assert "dynamic_batching" in told


def test_the_index_can_be_asked_for_what_is_ready(explicit: RunningServer, root: Path) -> None:
    write_identity(root, "idle")
    url = f"http://{explicit.http_url}/v2/repository/index"
    assert [row["name"] for row in httpx.post(url, json={"ready": True}).json()] == ["echo"]
    assert [row["name"] for row in httpx.post(url).json()] == ["echo", "idle"]
    index = _unary(explicit, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True), pb.RepositoryIndexResponse)
    assert [(row.name, row.version, row.state) for row in index.models] == [("echo", "2", "READY")]


def _unary(server: RunningServer, method: str, request: Any, reply: Any) -> Any:
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        return call(request, timeout=30)


def test_kserve_puts_the_name_elsewhere(explicit: RunningServer, root: Path) -> None:
    """KServe's message has the model's name in field 1, which is Triton's `repository_name`."""
    write_identity(root, "later")
    _unary(
        explicit,
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(repository_name="later"),
        pb.RepositoryModelLoadResponse,
    )
    with HttpClient(explicit) as client:
        assert _infer(client, "later") == (1, "1")
        _unary(
            explicit,
            "RepositoryModelUnload",
            pb.RepositoryModelUnloadRequest(repository_name="later"),
            pb.RepositoryModelUnloadResponse,
        )
        assert not client.is_model_ready("later")


def test_naming_one_repository_needs_namespaces(explicit: RunningServer) -> None:
    for path in ("models/echo/load", "models/echo/unload"):
        answer = httpx.post(f"http://{explicit.http_url}/v2/repository/mine/{path}")
        assert (answer.status_code, "'mine'" in answer.json()["error"]) == (501, True)
    for method, request in (
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="mine", model_name="echo")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(repository_name="mine", model_name="echo")),
    ):
        with pytest.raises(grpc.RpcError, match="'mine'") as refused:
            _unary(explicit, method, request, pb.RepositoryModelLoadResponse)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_loads_that_take_long_run_side_by_side_and_delay_nobody(
    async_protocol: type[AsyncClient], explicit: RunningServer, root: Path
) -> None:
    latches = {name: write_latched(root, name, held="load") for name in ("slow0", "slow1", "slow2")}
    async with async_protocol(explicit) as client:
        loads = asyncio.gather(*(client.raw.load_model(name) for name in latches))
        await until(lambda: all(latch.is_reached for latch in latches.values()), "they were loaded side by side")
        await client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)})
        assert not loads.done()
        for latch in latches.values():
            latch.open()
        await loads


async def test_what_is_in_flight_is_answered_when_its_model_goes(
    async_protocol: type[AsyncClient], explicit: RunningServer, root: Path
) -> None:
    write_gated(root, "gated", more="dynamic_batching { max_queue_delay_microseconds: 60000000 }")
    async with async_protocol(explicit) as client:
        await client.raw.load_model("gated")
        async with GatedModel(explicit, client, "gated") as gated:
            # A full batch executes; one row waits for company that will never come.
            executing = await gated.block(rows=8)
            waiting = await gated.send("waiting")
            await client.raw.unload_model("gated")
            with pytest.raises(ClientError, match=r"UNLOADING|unload") as refused:
                await gated.start("late")
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert not executing.done()
            assert not waiting.done()
            gated.gate.release()
            await asyncio.wait_for(asyncio.gather(executing, waiting), 60)
            assert gated.gate.batches == [("blocker",), ("waiting",)]


async def test_a_reload_answers_old_requests_by_the_old_version(
    async_protocol: type[AsyncClient], explicit: RunningServer, root: Path
) -> None:
    write_gated(root, "gated")
    async with async_protocol(explicit) as client:
        await client.raw.load_model("gated")
        async with GatedModel(explicit, client, "gated") as gated:
            old = await gated.block("old")
            (root / "gated" / "2").mkdir()
            await client.raw.load_model("gated")
            new = await gated.block("new")
            gated.gate.let("new")
            assert (await new).model_version == "2"
            gated.gate.let("old")
            assert (await old).model_version == "1"
            await until(lambda: gated.inflight == 0, "all were answered")


async def test_loads_and_unloads_from_everywhere_end_in_a_state_that_is_one(explicit: RunningServer) -> None:
    """Operations of one model follow each other; one that a newer one overtook says so."""
    random = Random(7)
    async with AsyncHttpClient(explicit) as http, AsyncGrpcClient(explicit) as grpc_client:

        async def control() -> None:
            for _ in range(8):
                client = random.choice([http, grpc_client])
                call = random.choice([client.raw.load_model, client.raw.unload_model])
                try:
                    await call("echo")
                except InferenceServerException as error:
                    assert "superseded" in error.message()  # noqa: PT017 - most succeed
                await asyncio.sleep(random.random() * 0.005)

        async def ask(client: AsyncClient) -> int:
            num_answered = 0
            for number in range(100):
                data = np.full((1, 1), number, np.float32)
                try:
                    num_answered += (await client.infer("echo", {"INPUT0": data}))["OUTPUT0"].item() == number
                except ClientError as error:
                    expected = (ErrorCode.UNAVAILABLE, ErrorCode.NOT_FOUND)
                    assert error.code in expected  # noqa: PT017 - most succeed
                await asyncio.sleep(0.001)
            return num_answered

        answered = await asyncio.gather(ask(http), ask(grpc_client), *(control() for _ in range(10)))
        assert answered[0] > 0
        assert answered[1] > 0
        await http.raw.load_model("echo")
        answer = await grpc_client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)})
        assert answer.model_version == "2"
        await until(lambda: not _is_busy(explicit), "what was replaced was closed")
        rows = [(row.version, row.state.name) for row in explicit.call(explicit.server.repository.index)]
        assert rows == [(2, "READY")]


def _is_busy(server: RunningServer) -> bool:
    rows = server.call(server.server.repository.index)
    return any(row.state.name in ("LOADING", "UNLOADING") for row in rows)


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_only_the_explicit_mode_takes_requests(protocol: type[ProtocolClient], root: Path, mode: str) -> None:
    with (
        running_server(root, model_control_mode=mode, repository_poll_secs=600) as running,
        protocol(running) as client,
    ):
        for call in (client.load, client.unload):
            refused = _refused(call, "echo")
            assert refused.code is ErrorCode.UNAVAILABLE
            assert "--model-control-mode=explicit" in refused.message
            assert "not allowed" in refused.message
        assert _infer(client) == (1, "2")
        assert _rows(client)["echo", "2"] == ("READY", "")


def test_the_poll_mode_follows_the_disk(protocol: type[ProtocolClient], root: Path) -> None:
    with (
        running_server(root, model_control_mode="poll", repository_poll_secs=1) as running,
        protocol(running) as client,
    ):
        assert _infer(client) == (1, "2")
        (root / "echo" / "3").mkdir()
        write_identity(root, "late")
        shutil.copytree(root / "late", root / "broken")
        (root / "broken" / "config.pbtxt").write_text("backend: 7")
        until_true(lambda: _infer(client) == (1, "3") and client.is_model_ready("late"), "the new ones were found")
        shutil.rmtree(root / "late")
        until_true(lambda: not client.is_model_ready("late"), "it was seen to be gone")
        assert _rows(client)["broken", ""][0] == "UNAVAILABLE"

"""What a server allows that was told nothing but where its models are; and each limit on a request, at the limit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.asking import ask, infer
from support.layouts import free_port
from support.model_files import write_identity
from support.processes import ServerProcess

from modelserver.options.server_options import ServerOptions
from modelserver.protocol.limits import HttpLimits

ROOT = Path(__file__).parents[1]
LIMITS = HttpLimits()
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_identity(root)
    write_identity(root.parent / "elsewhere", "stranger")
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    """Ports that are free, because those of the defaults may be taken; else what `modelserver serve DIRECTORY` is."""
    ports = [f"--{name}-port={free_port()}" for name in ("http", "grpc", "metrics")]
    server = ServerProcess([str(repository), *ports])
    try:
        server.wait_until_started()
        yield server
        server.signal()
        assert server.wait() == 0
    finally:
        server.close()


def test_only_this_machine_reaches_it_and_the_log_says_how_to_open_it(server: ServerProcess) -> None:
    listening = [each for each in psutil.Process(server.process.pid).net_connections() if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
    assert len(listening) == 3
    assert "only this machine reaches these ports; --host=0.0.0.0 opens them to the network" in server.output


def test_onnx_runtime_tells_nobody_of_models(tmp_path: Path) -> None:
    """Else its builds keep an id of the machine in the home directory, and events until they are sent."""
    its_own = ("CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in its_own}
    code = (
        "from modelserver.backend.discovery import find_backend; find_backend('onnxruntime'); import onnxruntime; "
        "onnxruntime.InferenceSession('model_repository/digits_onnx/1/model.onnx')"
    )
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, cwd=ROOT, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_onnx_runtime_does_what_its_operator_said() -> None:
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "0"}
    code = "import os, modelserver; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_addresses_of_ports_are_that_of_the_host_unless_they_have_their_own() -> None:
    options = ServerOptions(model_repository=("m",), host="10.0.0.1", grpc_address="10.0.0.2")
    assert (options.http_host, options.grpc_host, options.metrics_host) == ("10.0.0.1", "10.0.0.2", "10.0.0.1")


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_no_client_loads_or_unloads(server: ServerProcess, verb: str) -> None:
    status, answer = ask(server.http_url, "POST", f"/v2/repository/models/identity/{verb}", b"{}")
    assert status == 503
    assert "--model-control-mode=explicit" in answer["error"]
    assert infer(server.http_url, 1.0) == (200, 1.0)


def test_no_client_brings_files(server: ServerProcess) -> None:
    parameters = {"config": "{}", "file:1/model.py": "aW1wb3J0IG9z"}
    body = json.dumps({"parameters": parameters}).encode()
    assert ask(server.http_url, "POST", "/v2/repository/models/new/load", body)[0] == 503


@pytest.mark.parametrize(
    "name", ["..", "../elsewhere/stranger", "/etc", "%2e%2e%2felsewhere%2fstranger", "identity/.."]
)
def test_names_of_models_do_not_leave_the_repository(server: ServerProcess, name: str) -> None:
    status, _ = ask(server.http_url, "GET", f"/v2/models/{name.replace('/', '%2F')}/ready")
    assert status in (400, 404)
    assert ask(server.http_url, "GET", f"/v2/models/{name}/config")[0] in (400, 404)


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_no_client_names_shared_memory(server: ServerProcess, kind: str) -> None:
    body = json.dumps({"key": "/any", "offset": 0, "byte_size": 64, "raw_handle": {"b64": ""}, "device_id": 0}).encode()
    status, answer = ask(server.http_url, "POST", f"/v2/{kind}sharedmemory/region/any/register", body)
    assert status >= 400, answer


def test_the_defaults_of_what_is_dangerous_are_off() -> None:
    options = ServerOptions(model_repository=("m",))
    assert options.model_control_mode == "none"
    for name in (
        "allow_client_shm",
        "allow_pickle_models",
        "allow_model_backends",
        "allow_sagemaker",
        "allow_vertex_ai",
    ):
        assert getattr(options, name) is False, name


# What could run what a request, a socket or a cache says.
_MODULES = "pickle|cloudpickle|marshal|shelve|dill|joblib"
DANGEROUS = re.compile(rf"^\s*(import|from) ({_MODULES})\b|\byaml\.load\(|(?<!def )(?<![.\w])(eval|exec)\(")
# Each file that may, and why no client's words come there.
ALLOWED = {
    "backends/pytorch/archive.py",  # lists the opcodes of a checkpoint, and runs none
}
# What fetches an address: copies of models, traces, and our own commands.
FETCHING = re.compile(r"^\s*(import|from) (urllib\.request|requests|httpx|aiohttp|urllib3)\b")


def _sources() -> Iterator[tuple[str, str]]:
    for room in ("modelserver", "backends"):
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_nothing_reads_pickles_or_runs_text() -> None:
    found = {name for name, text in _sources() if any(DANGEROUS.search(line) for line in text.splitlines())}
    assert found <= ALLOWED


def test_nothing_in_the_path_of_a_request_can_fetch_an_address() -> None:
    found = {name for name, text in _sources() if any(FETCHING.search(line) for line in text.splitlines())}
    assert not {
        name for name in found if name.startswith(("modelserver/frontends", "modelserver/wire", "backends/llm"))
    }


def _document(**changes: object) -> bytes:
    return json.dumps({"inputs": [TENSOR | changes]}).encode()


def _inputs(num_inputs: int) -> bytes:
    return json.dumps({"inputs": [TENSOR | {"name": f"I{number}"} for number in range(num_inputs)]}).encode()


def _nested(depth: int) -> bytes:
    """Lists in lists, as deep as that in all."""
    data = "[" * (depth - 3) + "1" + "]" * (depth - 3)
    return b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":%s}]}' % data.encode()


@pytest.mark.parametrize(
    ("within", "beyond", "words"),
    [
        pytest.param(
            _document(name="x" * LIMITS.max_name_len), _document(name="x" * (LIMITS.max_name_len + 1)), "", id="name"
        ),
        pytest.param(
            _document(shape=[1] * (LIMITS.max_rank - 1) + [2]),
            _document(shape=[1] * LIMITS.max_rank + [2]),
            "dimensions",
            id="rank",
        ),
        pytest.param(_inputs(LIMITS.max_tensors), _inputs(LIMITS.max_tensors + 1), "more than 1024", id="tensors"),
        pytest.param(
            _nested(LIMITS.max_json_depth), _nested(LIMITS.max_json_depth + 1), "nesting depth exceeds", id="depth"
        ),
    ],
)
def test_limits_of_a_document_at_the_limit(server: ServerProcess, within: bytes, beyond: bytes, words: str) -> None:
    """Within it the document is wrong for another reason; beyond it the limit is."""
    path = "/v2/models/identity/infer"
    _, fits = ask(server.http_url, "POST", path, within)
    status, refused = ask(server.http_url, "POST", path, beyond)
    assert status in (400, 413)
    assert words in refused["error"]
    assert refused["error"] != fits.get("error"), "the two differ by the limit"


def test_the_limit_of_a_body_at_the_limit(repository: Path) -> None:
    limit = 4096
    server = ServerProcess(
        [str(repository), "--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--http-max-input-size={limit}"]
    )
    try:
        server.wait_until_started()
        document = _document()
        for size, expected in ((limit - 1, 200), (limit, 200), (limit + 1, 413)):
            status, answer = ask(
                server.http_url, "POST", "/v2/models/identity/infer", document + b" " * (size - len(document))
            )
            assert status == expected, answer
    finally:
        server.close()

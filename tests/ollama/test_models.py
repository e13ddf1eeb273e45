"""The lists of models, what each is, how long each stays, and paths that are not served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
from support.gguf_models import write_gguf
from support.keys import KeyFile
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint

from modelserver.auth.api_keys import Scope


def test_language_models_are_listed_with_their_tag(client: ollama.Client) -> None:
    models = client.list().models
    assert [model.model for model in models] == ["agent:latest", "encoder:latest", "mock:latest", "plain:latest"]
    assert all(model.size and model.digest and len(model.digest) == 64 and model.modified_at for model in models)


def test_models_in_memory_are_running(client: ollama.Client) -> None:
    running = {model.model: model for model in client.ps().models}
    assert running["mock:latest"].context_length == 512
    assert running["mock:latest"].expires_at is not None


def test_a_model_is_described_by_what_it_can_do(client: ollama.Client) -> None:
    assert client.show("agent").capabilities == ["completion", "tools", "thinking"]
    assert client.show("encoder").capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="model 'nothing' not found") as caught:
        client.show("nothing")
    assert caught.value.status_code == 404


@pytest.mark.parametrize("name", ["mock", "mock:latest", "MOCK", "Mock:latest"])
def test_a_model_is_found_with_and_without_its_tag_in_any_case(client: ollama.Client, name: str) -> None:
    answer = client.chat(name, [{"role": "user", "content": "one"}])
    assert (answer.message.content, answer.model) == ("one", name)


def test_the_version_is_one_of_ollama(http: httpx.Client) -> None:
    assert [int(part) for part in http.get("/api/version").json()["version"].split(".")] > [0, 9, 0]


def test_unknown_paths_and_methods_are_refused_in_this_form(http: httpx.Client) -> None:
    answer = http.get("/api/nothing")
    assert (answer.status_code, list(answer.json())) == (404, ["error"])
    answer = http.get("/api/chat")
    assert (answer.status_code, list(answer.json())) == (405, ["error"])
    assert answer.headers["allow"] == "POST"


def test_a_model_on_demand_is_loaded_kept_and_unloaded(tmp_path: Path) -> None:
    write_mock_llm(tmp_path, "mock")
    with (
        running_server(tmp_path, load_on_demand=True) as server,
        ollama.Client(host=f"http://{server.http_url}") as client,
    ):
        assert [model.model for model in client.list().models] == ["mock:latest"]
        assert client.ps().models == []
        assert client.generate("mock", keep_alive="10m").done_reason == "load"
        assert [model.model for model in client.ps().models] == ["mock:latest"]
        assert client.generate("mock", keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        answer = client.chat("mock", [{"role": "user", "content": "one"}], keep_alive=0)
        assert answer.message.content == "one"
        assert client.ps().models == []


def test_a_port_of_its_own_is_where_clients_look(tmp_path: Path) -> None:
    write_mock_llm(tmp_path, "mock")
    with running_server(tmp_path, ollama=True, ollama_port=0) as server:
        port = server.server.port_of("Ollama's clients")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            assert http.get("/").text == "Ollama is running"
            assert http.head("/").status_code == 200
            assert http.get("/api/tags").json()["models"][0]["name"] == "mock:latest"
            assert http.get("/v1/models").json()["data"][0]["id"] == "mock"
            assert http.get("/v2/health/live").status_code == 404


def test_clients_ask_for_the_head_of_the_root_first(llm_server: RunningServer) -> None:
    with httpx.Client(base_url=f"http://{llm_server.http_url}") as http:
        head = http.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert http.get("/").text.startswith("modelserver is running")
        assert http.post("/").status_code == 405


def test_keys_are_checked_and_keep_their_scopes(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_mock_llm(root, "mock")
    keys = KeyFile(tmp_path / "keys.yaml")
    headers = {"Authorization": f"Bearer {keys.add('client', Scope.INFER)}"}
    with running_server(root, load_on_demand=True, api_keys_file=str(keys.path)) as server:
        asked = {"model": "mock", "messages": [{"role": "user", "content": "one"}], "stream": False}
        with httpx.Client(base_url=f"http://{server.http_url}", timeout=20) as http:
            refused = http.post("/api/chat", json=asked)
            assert (refused.status_code, list(refused.json())) == (401, ["error"])
            assert http.post("/api/chat", json={**asked, "keep_alive": 60}, headers=headers).status_code == 200
            unload = http.post("/api/generate", json={"model": "mock", "keep_alive": 0}, headers=headers)
            assert (unload.status_code, list(unload.json())) == (403, ["error"])


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    """Models of a repository that no request has loaded: a checkpoint, a GGUF file, and one that lies elsewhere."""
    root = tmp_path_factory.mktemp("described")
    source = write_checkpoint(root / "elsewhere")
    for name in ("checkpoint", "gguf", "named"):
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text('backend: "llm"\n')
    write_checkpoint(root / "models" / "checkpoint" / "1")
    write_gguf(source, root / "models" / "gguf" / "1" / "model.gguf")
    (root / "models" / "named" / "1" / "model.json").write_text('{"model": "../../../elsewhere"}')
    with (
        running_server(root / "models", load_on_demand=True) as server,
        ollama.Client(host=f"http://{server.http_url}") as client,
    ):
        yield client


def test_the_details_of_models_are_known_before_they_are_loaded(described: ollama.Client) -> None:
    listed = {each.model: each for each in described.list().models}
    assert described.ps().models == []
    for name, form in (("checkpoint", "safetensors"), ("gguf", "gguf"), ("named", "safetensors")):
        model = listed[f"{name}:latest"]
        details = model.details
        assert details is not None
        assert (details.format, details.family, details.families) == (form, "llama", ["llama"])
        assert details.quantization_level == "F32"
        assert re.fullmatch(r"[\d.]+[KM]", details.parameter_size or "")
        assert (model.size or 0) > 10_000
    assert described.show("gguf").details == listed["gguf:latest"].details

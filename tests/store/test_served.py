"""Models of a store behind a whole server: by every name, as they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from support.clients import GrpcClient
from support.gguf_models import write_gguf
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint
from support.waiting import until_true

from modelserver.store.draft import Recipe
from modelserver.store.store import Store

ON_THE_HUB = "hf.co/org/tiny:Q8_0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    return write_gguf(write_checkpoint(directory / "source"), directory / "tiny.gguf")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    store.create("tiny", Recipe(path=weights))
    store.create(ON_THE_HUB, Recipe(base="tiny", parameters={"num_predict": 3}))
    store.create("tiny:checkpoint", Recipe(path=weights.parent / "source"))
    (weights.parent / "alien.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    store.create("alien", Recipe(path=weights.parent / "alien.gguf"))
    return store


@pytest.fixture(scope="module")
def served(store: Store) -> Iterator[RunningServer]:
    with running_server((), store=str(store.directory)) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=60) as client:
        yield client


def chat(http: httpx.Client, model: str) -> httpx.Response:
    document = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return http.post("/v1/chat/completions", json=document)


def listed(http: httpx.Client) -> list[str]:
    return [each["id"] for each in http.get("/v1/models").json()["data"]]


def test_all_models_are_listed_before_any_is_loaded(http: httpx.Client) -> None:
    assert listed(http) == [ON_THE_HUB, "tiny", "tiny:checkpoint"]
    tags = [each["name"] for each in http.get("/api/tags").json()["models"]]
    assert tags == [ON_THE_HUB, "tiny:latest", "tiny:checkpoint"]
    rows: list[dict[str, Any]] = http.post("/v2/repository/index").json()
    assert {row["name"] for row in rows} == {"alien", "hf.co~org~tiny:Q8_0", "tiny", "tiny:checkpoint"}


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", ON_THE_HUB, "hf.co~org~tiny:Q8_0", "tiny:checkpoint"])
def test_every_api_takes_every_name(http: httpx.Client, served: RunningServer, name: str) -> None:
    answer = chat(http, name)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    document = {"model": name, "prompt": "hi", "stream": False, "raw": True, "options": {"num_predict": 2}}
    assert http.post("/api/generate", json=document).json()["done"] is True
    assert http.get(f"/v2/models/{quote(name, safe='')}").json()["platform"] == "llm"
    assert http.get(f"/v2/models/{quote(name, safe='')}/ready").status_code == 200
    with GrpcClient(served) as grpc:
        assert grpc.is_model_ready(name)


def test_a_model_that_cannot_be_served_says_why_when_it_is_used(http: httpx.Client) -> None:
    answer = chat(http, "alien")
    assert answer.status_code >= 400
    assert "GGUF" in answer.text or "gguf" in answer.text


def test_models_come_and_go_while_the_server_runs(http: httpx.Client, store: Store) -> None:
    assert chat(http, "later").status_code == 404
    other = Store(store.directory)  # as another process has it
    other.copy("tiny", "later")
    assert "later" in listed(http)
    assert chat(http, "later").status_code == 200
    other.remove("later")
    until_true(lambda: chat(http, "later").status_code == 404, "the removed model is unloaded")
    assert "later" not in listed(http)
    other.copy("tiny", "later")
    assert "later" in listed(http)
    assert chat(http, "later").status_code == 200
    other.remove("later")


def test_a_name_that_is_given_to_another_model_is_loaded_again(http: httpx.Client, store: Store) -> None:
    store.copy("tiny", "moving")
    until_true(lambda: chat(http, "moving").status_code == 200, "the model is found")
    store.copy("alien", "moving")
    until_true(lambda: chat(http, "moving").status_code >= 400, "the new content is loaded")
    store.remove("moving")


def test_a_repository_in_tritons_layout_is_served_from_the_store(
    http: httpx.Client, store: Store, tmp_path: Path
) -> None:
    directory = tmp_path / "echo"
    (directory / "1").mkdir(parents=True)
    config = 'backend: "identity" max_batch_size: 4\n'
    for kind in ("input", "output"):
        config += f'{kind} {{ name: "{kind.upper()}0" data_type: TYPE_INT32 dims: 1 }}\n'
    (directory / "config.pbtxt").write_text(config)
    (directory / "1" / "notes.txt").write_text("a file of the version")
    store.create("echo", Recipe(path=directory))
    body = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [5]}]}
    answer = http.post("/v2/models/echo/infer", json=body)
    assert answer.json()["outputs"][0]["data"] == [5], answer.text
    store.remove("echo")

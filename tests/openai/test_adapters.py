"""Adapters of language models by every way of naming them, and their coming and going while the model serves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from support.keys import KeyFile
from support.serving import RunningServer, running_server
from support.tiny_adapters import peft_tokens, write_adapter
from support.tiny_checkpoints import reference_tokens, write_checkpoint

from modelserver.auth.api_keys import SCOPES

PROMPT = [7, 8, 9, 10, 11]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = write_checkpoint(root / "base")
    kinds: dict[str, dict[str, Any]] = {"sql": {}, "poet": {"target_modules": ["q_proj", "v_proj"]}, "late": {}}
    return {"base": base} | {
        name: write_adapter(base, root / name, seed=seed, **kind) for seed, (name, kind) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module")
def expected(places: dict[str, Path]) -> dict[str, list[int]]:
    base = places["base"]
    found = {name: peft_tokens(base, places[name], [PROMPT], NUM_TOKENS)[0] for name in ("sql", "poet", "late")}
    found["tiny"] = reference_tokens(base, PROMPT, NUM_TOKENS)
    assert len(set(map(tuple, found.values()))) == 4
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    for scope in SCOPES:
        file.add(scope.value, scope)
    file.add("everything", *SCOPES)
    file.add("one-model", *SCOPES, models=("tiny",))
    return file


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, places: dict[str, Path], keys: KeyFile) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    version = root / "tiny" / "1"
    version.mkdir(parents=True)
    described = {"model": str(places["base"]), "dtype": "float32", "enable_lora": True, "max_loras": 2}
    (version / "model.json").write_text(json.dumps(described))
    (version / "multi_lora.json").write_text(json.dumps({"sql": str(places["sql"])}))
    (version / "adapters").mkdir()
    (version / "adapters" / "poet").symlink_to(places["poet"])
    (root / "tiny" / "config.pbtxt").write_text('backend: "vllm"')
    with running_server(root, api_keys_file=str(keys.path), allow_runtime_lora_updating=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: RunningServer, keys: KeyFile) -> Iterator[openai.OpenAI]:
    key = keys.texts["infer"]
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key=key, max_retries=0) as connected:
        yield connected


def http_of(served: RunningServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{served.http_url}", headers={"Authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(scope="module")
def admin(served: RunningServer, keys: KeyFile) -> Iterator[httpx.Client]:
    with http_of(served, keys.texts["everything"]) as connected:
        yield connected


def tokens_of(client: openai.OpenAI, model: str, **body: Any) -> list[int]:
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **body},
    )
    assert answer.model == model
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def test_adapters_are_models_of_openai_s_api(client: openai.OpenAI, expected: dict[str, list[int]]) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {name: model.parent for name, model in listed.items()} == {"tiny": None, "sql": "tiny", "poet": "tiny"}  # type: ignore[attr-defined]
    assert client.models.retrieve("sql").parent == "tiny"  # type: ignore[attr-defined]
    for name in ("tiny", "sql", "poet"):
        assert tokens_of(client, name) == expected[name]
    assert tokens_of(client, "tiny", lora_name="poet") == expected["poet"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        tokens_of(client, "late")


def test_a_key_for_a_model_is_good_for_its_adapters(
    served: RunningServer, keys: KeyFile, expected: dict[str, list[int]]
) -> None:
    url = f"http://{served.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key=keys.texts["one-model"], max_retries=0) as client:
        assert tokens_of(client, "poet") == expected["poet"]
        with pytest.raises(openai.PermissionDeniedError):
            tokens_of(client, "other")


def triton_tokens(served: RunningServer, key: str, **sampling: Any) -> list[int]:
    client = triton.InferenceServerClient(served.http_url)
    values = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    inputs = []
    for name, datatype, array in (
        ("input_ids", "INT32", np.array(PROMPT, np.int32)),
        ("sampling_parameters", "BYTES", np.array([json.dumps(values).encode()], object)),
        ("return_token_ids", "BOOL", np.array([True])),
    ):
        inputs.append(triton.InferInput(name, array.shape, datatype))
        inputs[-1].set_data_from_numpy(array)
    result = client.infer("tiny", inputs, headers={"Authorization": f"Bearer {key}"})
    return list(map(int, result.as_numpy("token_ids")))


def test_triton_s_clients_name_them(served: RunningServer, keys: KeyFile, expected: dict[str, list[int]]) -> None:
    key = keys.texts["infer"]
    assert triton_tokens(served, key, lora_name="sql") == expected["sql"]
    assert triton_tokens(served, key, lora_request={"lora_name": "poet"}) == expected["poet"]
    with pytest.raises(triton.InferenceServerException, match=r"LoRA bart is not supported, we currently support \["):
        triton_tokens(served, key, lora_name="bart")


def test_they_come_and_go_while_the_model_serves(
    served: RunningServer,
    client: openai.OpenAI,
    admin: httpx.Client,
    keys: KeyFile,
    places: dict[str, Path],
    expected: dict[str, list[int]],
) -> None:
    body = {"lora_name": "late", "lora_path": str(places["late"])}
    with http_of(served, keys.texts["infer"]) as other:
        assert other.post("/v1/load_lora_adapter", json=body).status_code == 403
    loaded = admin.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert tokens_of(client, "late") == expected["late"]
    assert triton_tokens(served, keys.texts["infer"], lora_name="late") == expected["late"]
    again = admin.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 400
    assert "has already been loaded" in again.text
    # In place, from other files: what the prefix cache holds of the old ones is not used.
    other_files = {"lora_name": "late", "lora_path": str(places["sql"]), "load_inplace": True}
    assert admin.post("/v1/load_lora_adapter", json=other_files).status_code == 200
    assert tokens_of(client, "late") == expected["sql"]
    unloaded = admin.post("/v1/unload_lora_adapter", json={"lora_name": "late"})
    assert unloaded.text == "Success: LoRA adapter 'late' removed successfully."
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404
    with pytest.raises(openai.NotFoundError):
        tokens_of(client, "late")


def test_unloading_lets_requests_end(
    client: openai.OpenAI, admin: httpx.Client, places: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    admin.post("/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": str(places["late"])})
    stream = client.completions.create(
        model="late",
        prompt=PROMPT,
        max_tokens=200,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens: list[int] = []
    for number, chunk in enumerate(stream):
        if not number:
            admin.post("/v1/unload_lora_adapter", json={"lora_name": "late"})
        if chunk.choices:
            tokens += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
    assert len(tokens) == 200
    assert tokens[:NUM_TOKENS] == expected["late"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided"),
        ({"lora_name": "x", "lora_path": "relative"}, 400, "must be an absolute path"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 404, "the adapter 'x' in /nowhere: there is no file"),
        ({"lora_name": "sql", "lora_path": "/nowhere"}, 400, "an adapter of a model's files"),
        ({"lora_name": "tiny", "lora_path": "/nowhere"}, 400, "is a model"),
    ],
)
def test_refused_loads(admin: httpx.Client, body: dict[str, Any], status: int, message: str) -> None:
    answer = admin.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


def test_a_storm_of_callers_leaves_the_right_answers(client: openai.OpenAI, expected: dict[str, list[int]]) -> None:
    """More adapters than slots, side by side."""
    found: list[tuple[str, list[int]]] = []

    def ask(name: str) -> None:
        found.append((name, tokens_of(client, name)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("sql", "poet", "tiny") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(tokens == expected[name] for name, tokens in found)


def test_tgi_s_adapter_id(client: openai.OpenAI, admin: httpx.Client) -> None:
    body = {"inputs": "one two", "parameters": {"max_new_tokens": 5, "adapter_id": "sql"}}
    named = client.completions.create(model="sql", prompt="one two", max_tokens=5, temperature=0)
    answer = admin.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["generated_text"] == named.choices[0].text


def test_llama_cpp_s_ids_and_scales(client: openai.OpenAI, admin: httpx.Client) -> None:
    listed = admin.get("/lora-adapters").json()
    assert [(each["id"], each["name"], each["scale"]) for each in listed] == [(0, "sql", 0.0), (1, "poet", 0.0)]
    body = {"prompt": "one two", "n_predict": 5, "temperature": 0}
    texts = {
        name: client.completions.create(model=name, prompt="one two", max_tokens=5, temperature=0).choices[0].text
        for name in ("tiny", "sql", "poet")
    }

    def text(**given: Any) -> str:
        answer = admin.post("/completion", json=body | given)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["content"])

    assert text(lora=[{"id": 1, "scale": 1.0}]) == texts["poet"]
    assert admin.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).json() == {"success": True}
    assert (text(), text(lora=[])) == (texts["sql"], texts["tiny"])
    assert admin.post("/lora-adapters", json=[]).status_code == 200
    assert text() == texts["tiny"]
    assert "has the id 7" in admin.post("/completion", json=body | {"lora": [{"id": 7, "scale": 1}]}).text


def test_metrics_tell_which_adapters_run(served: RunningServer, client: openai.OpenAI, keys: KeyFile) -> None:
    tokens_of(client, "poet")
    headers = {"Authorization": f"Bearer {keys.texts['everything']}"}
    page = httpx.get(f"http://{served.metrics_url}/metrics", headers=headers).text
    (info,) = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert all(label in info for label in ('max_lora="2"', 'running_lora_adapters=""', 'waiting_lora_adapters=""'))
    counts = [line for line in page.splitlines() if line.startswith("llm_adapter_") and 'lora_name="poet"' in line]
    assert len(counts) == 2

"""Names, and sources other than registries: the hub, single files, and what each chooses."""

from __future__ import annotations

import os

import pytest
from support.model_sources import MODEL, FakeHost, digest_of

from modelserver.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.store.hub import HubFile, choose
from modelserver.store.names import (
    CloudPlace,
    FilePlace,
    ModelName,
    UrlPlace,
    name_of_place,
    parse_name,
    parse_place,
)
from modelserver.store.store import Store

WEIGHTS = b"GGUF" + os.urandom(300_000)


@pytest.mark.parametrize(
    ("text", "parts", "shown", "repository_name"),
    [
        ("qwen3", ("registry.ollama.ai", "library", "qwen3", "latest"), "qwen3:latest", "qwen3"),
        ("qwen3:0.6b", ("registry.ollama.ai", "library", "qwen3", "0.6b"), "qwen3:0.6b", "qwen3:0.6b"),
        ("me/mine:v1", ("registry.ollama.ai", "me", "mine", "v1"), "me/mine:v1", "me~mine:v1"),
        ("localhost:5000/a/b:c", ("localhost:5000", "a", "b", "c"), "localhost:5000/a/b:c", "localhost:5000~a~b:c"),
        ("hf.co/org/m:Q4_K_M", ("hf.co", "org", "m", "Q4_K_M"), "hf.co/org/m:Q4_K_M", "hf.co~org~m:Q4_K_M"),
        ("huggingface.co/org/m", ("hf.co", "org", "m", "latest"), "hf.co/org/m:latest", "hf.co~org~m"),
        ("ghcr.io/org/model", ("ghcr.io", "org", "model", "latest"), "ghcr.io/org/model:latest", "ghcr.io~org~model"),
    ],
)
def test_names_are_completed_as_ollama_does(
    text: str, parts: tuple[str, ...], shown: str, repository_name: str
) -> None:
    name = parse_name(text)
    assert (name.host, name.namespace, name.model, name.tag) == parts
    assert (str(name), name.repository_name) == (shown, repository_name)
    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text", ["", "a/b/c/d", "../x", "a/../b", "a:b:c", "a b", "file:/etc/passwd", "x:", "/x", "a/b/", "h/..x/m", "~x"]
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_name(text)


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("file:/models/a.gguf", FilePlace, "a"),
        ("./Qwen3-0.6B", FilePlace, "Qwen3-0.6B"),
        ("https://example.com/x/tiny%20one.gguf?download=1", UrlPlace, "tiny-one"),
        ("s3://bucket/models/tiny.onnx", CloudPlace, "tiny"),
        ("https://huggingface.co/org/model", ModelName, "hf.co/org/model"),
        ("hf://org/model:Q8_0", ModelName, "hf.co/org/model:Q8_0"),
    ],
)
def test_places(text: str, kind: type, name: str) -> None:
    place = parse_place(text)
    assert isinstance(place, kind)
    assert name_of_place(place).short == name


@pytest.fixture
def hub(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    monkeypatch.setenv("HF_ENDPOINT", host.address)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return host


def test_a_quantization_is_pulled_from_the_hub(store: Store, hub: FakeHost) -> None:
    hub.add_hub_model(
        "org/tiny-GGUF", {"README.md": b"x" * 200, "tiny-q4_k_m.gguf": WEIGHTS, "tiny-Q8_0.gguf": b"GGUF8"}
    )
    hub.cuts["/org/tiny-GGUF/resolve/c0ffee/tiny-q4_k_m.gguf"] = [100_000]
    name = store.pull("hf.co/org/tiny-GGUF:Q4_K_M")
    assert str(name) == "hf.co/org/tiny-GGUF:Q4_K_M"
    manifest = store.read_manifest("hf.co/org/tiny-gguf:q4_k_m")
    assert [(layer.media_type, layer.digest, layer.title) for layer in manifest.layers] == [
        (MODEL, digest_of(WEIGHTS), "")
    ]
    assert store.describe(str(name)).config["file_type"] == "Q4_K_M"
    asked = [(path, headers) for _, path, headers in hub.requests if "org/tiny" in path]
    shown = [(path, headers.get("Authorization") or headers.get("authorization")) for path, headers in asked]
    assert len(asked) == 3
    assert [path for path, token in shown if token != "Bearer hf_secret"] == []
    with pytest.raises(NotFoundError, match=r"has no 'Q3'; there are: Q8_0, q4_k_m"):
        store.pull("hf.co/org/tiny-GGUF:Q3")


def test_a_checkpoint_is_pulled_from_the_hub_without_pickles(store: Store, hub: FakeHost) -> None:
    files = ("config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json")
    others = ("pytorch_model.bin", "modeling.py", "onnx/model.onnx", ".gitattributes", "README.md")
    hub.add_hub_model("org/tiny", {name: name.encode() * 30 for name in (*files, *others)})
    store.pull("hf.co/org/tiny")
    titles = {layer.title for layer in store.read_manifest("hf.co/org/tiny").layers}
    assert titles == set(files)


def test_repositories_that_cannot_be_served(store: Store, hub: FakeHost) -> None:
    hub.add_hub_model("org/old", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(UnsupportedError, match=r"pytorch_model.bin is a pickle"):
        store.pull("hf.co/org/old")
    with pytest.raises(NotFoundError, match="the hub has no model 'org/none'"):
        store.pull("hf.co/org/none")


def choice(paths: str, tag: str) -> str:
    files, _ = choose([HubFile(path, 1) for path in paths.split()], parse_name(f"hf.co/org/m:{tag}"))
    return " ".join(file.path for file in files)


@pytest.mark.parametrize(
    ("paths", "tag", "chosen"),
    [
        ("m-Q8_0.gguf m-Q4_K_M.gguf mmproj-F16.gguf", "latest", "m-Q4_K_M.gguf"),
        ("m-Q8_0.gguf m.IQ2_XS.gguf", "iq2_xs", "m.IQ2_XS.gguf"),
        ("m-F16.gguf mmproj-m-F16.gguf", "f16", "m-F16.gguf"),
        ("m-BF16.gguf m-F16.gguf", "F16", "m-F16.gguf"),
        ("Q6_K/m-Q6_K-00001-of-00002.gguf Q6_K/m-Q6_K-00002-of-00002.gguf m-Q2_K.gguf", "Q6_K",
         "Q6_K/m-Q6_K-00001-of-00002.gguf Q6_K/m-Q6_K-00002-of-00002.gguf"),
        ("a.gguf b.gguf", "b.gguf", "b.gguf"),
        ("config.json model.safetensors consolidated.safetensors m-Q8_0.gguf", "safetensors",
         "config.json model.safetensors"),
    ],
)  # fmt: skip
def test_which_files_of_a_repository_are_the_model(paths: str, tag: str, chosen: str) -> None:
    assert choice(paths, tag) == chosen


def test_a_single_file_is_pulled_and_resumed(store: Store, host: FakeHost) -> None:
    host.files["/models/tiny.gguf"] = WEIGHTS
    host.cuts["/models/tiny.gguf"] = [1000, 0, 0, 0]
    with pytest.raises(UnavailableError, match="ended at 1000 of 300004 bytes"):
        store.pull(f"{host.address}/models/tiny.gguf")
    name = store.pull(f"{host.address}/models/tiny.gguf", name="mine")
    assert (str(name), store.read_manifest("mine").layers[0].digest) == ("mine:latest", digest_of(WEIGHTS))
    assert host.requests[-1][2]["Range"] == "bytes=1000-"


def test_files_and_directories_of_object_stores_are_pulled(store: Store) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/pulled/models/tiny.gguf", WEIGHTS)
    files.pipe("/pulled/checkpoint/config.json", b"{}")
    files.pipe("/pulled/checkpoint/model.safetensors", b"weights")
    files.pipe("/pulled/unsafe/model.py", b"import os")
    store.pull("memory://pulled/models/tiny.gguf")
    assert [layer.digest for layer in store.read_manifest("tiny").layers] == [digest_of(WEIGHTS)]
    store.pull("memory://pulled/checkpoint")
    titles = [layer.title for layer in store.read_manifest("checkpoint").layers]
    assert titles == ["config.json", "model.safetensors"]
    with pytest.raises(NotFoundError, match="there are no files at memory://pulled/none"):
        store.pull("memory://pulled/none")
    with pytest.raises(PermissionDeniedError):
        store.pull("memory://pulled/unsafe")


def test_a_file_of_another_kind_is_called_as_its_backend_expects(store: Store, host: FakeHost) -> None:
    host.files["/models/digits-v2.onnx"] = b"onnx"
    store.pull(f"{host.address}/models/digits-v2.onnx")
    assert [layer.title for layer in store.read_manifest("digits-v2").layers] == ["model.onnx"]

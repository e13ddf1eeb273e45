"""Models come into the store, and go: from registries and files, whole and interrupted."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.gguf_models import projector_bytes
from support.model_sources import MODEL, FakeHost, digest_of
from support.waiting import until_true

from modelserver.config.modelfile import parse_modelfile
from modelserver.errors import (
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.store.blobs import DigestError, StorageFullError
from modelserver.store.draft import Recipe
from modelserver.store.manifest import PROJECTOR
from modelserver.store.store import Store
from modelserver.store.task import Progress, StoreTask

TEMPLATE = "application/vnd.ollama.image.template"
PARAMS = "application/vnd.ollama.image.params"
WEIGHTS = b"GGUF" + os.urandom(3_000_000)


def blob_files(store: Store) -> set[str]:
    return {path.name.replace("-", ":") for path in (store.directory / "blobs").iterdir()}


def leftovers(store: Store) -> list[str]:
    return [path.name for name in ("partial", "claims") for path in (store.directory / name).iterdir()]


def blob_path(host: FakeHost, data: bytes = WEIGHTS) -> str:
    return f"/v2/library/tiny/blobs/{digest_of(data)}"


@pytest.fixture
def tiny(host: FakeHost) -> str:
    """The name of a model on the host."""
    host.add_model("library/tiny", {MODEL: WEIGHTS, TEMPLATE: b"{{ .Prompt }}", PARAMS: b'{"stop":["a"],"top_k":4}'})
    return f"{host.name}/library/tiny"


def test_a_model_is_pulled_from_a_registry(store: Store, host: FakeHost, tiny: str) -> None:
    reports: list[Progress] = []
    name = store.pull(tiny, task=StoreTask(reports.append))
    assert str(name) == f"{host.name}/library/tiny:latest"
    stored = store.find(tiny)
    # As Ollama lays it out, and byte for byte.
    path = store.directory / "manifests" / host.name / "library" / "tiny" / "latest"
    assert path.read_bytes() == stored.manifest.content == host.files["/v2/library/tiny/manifests/latest"]
    assert (store.directory / "blobs" / digest_of(WEIGHTS).replace(":", "-")).read_bytes() == WEIGHTS
    described = store.describe(tiny)
    assert (described.template, described.parameters) == ("{{ .Prompt }}", {"stop": ["a"], "top_k": 4})
    assert described.config == {"model_format": "gguf"}
    steps = [report.status for report in reports]
    assert (steps[0], steps[-2:]) == ("pulling manifest", ["writing manifest", "success"])
    last = [report for report in reports if report.digest == digest_of(WEIGHTS)][-1]
    assert (last.total, last.completed) == (len(WEIGHTS), len(WEIGHTS))
    assert leftovers(store) == []


def test_what_is_there_is_not_fetched_again(store: Store, host: FakeHost, tiny: str) -> None:
    store.pull(tiny)
    host.add_model("library/tiny", {MODEL: WEIGHTS, TEMPLATE: b"another"})
    store.pull(tiny)
    assert host.num_requests("GET", blob_path(host)) == 1
    assert store.describe(tiny).template == "another"
    # The blobs that only the model before needed are gone.
    assert digest_of(b"{{ .Prompt }}") not in blob_files(store)


def test_a_directory_that_ollama_wrote_is_a_store(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    weights = digest_of(WEIGHTS)
    (tmp_path / "blobs" / weights.replace(":", "-")).write_bytes(WEIGHTS)
    manifest = {"schemaVersion": 2, "layers": [{"mediaType": MODEL, "digest": weights, "size": len(WEIGHTS)}]}
    path = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "0.6b"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))
    (path.parent / ".DS_Store").write_text("not a model")
    store = Store(tmp_path)
    assert [str(each.name) for each in store.models()] == ["qwen3:0.6b"]
    assert store.find("Qwen3:0.6B").manifest.size_bytes == len(WEIGHTS)
    with pytest.raises(NotFoundError, match=r"model 'qwen3:0.7b' not found in .*did you mean qwen3:0.6b"):
        store.find("qwen3:0.7b")


def test_a_token_is_fetched_and_not_shown_to_other_hosts(store: Store, host: FakeHost, tiny: str) -> None:
    from support.model_sources import fake_host

    host.token = "secret"
    with fake_host() as storage:
        storage.files["/bucket/weights"] = WEIGHTS
        host.redirects[blob_path(host)] = f"{storage.address}/bucket/weights"
        store.pull(tiny)
        asked = [headers for _, path, headers in storage.requests if path == "/bucket/weights"]
    assert asked
    assert all("Authorization" not in headers for headers in asked)
    assert host.requests[1][1] == "/token?service=fake&scope=repository%3Ax%3Apull"


def test_a_cut_download_is_resumed(store: Store, host: FakeHost, tiny: str) -> None:
    host.cuts[blob_path(host)] = [1_000_000, 700_000]
    host.statuses[blob_path(host)] = [503]
    store.pull(tiny)
    ranges = [headers.get("Range") for _, path, headers in host.requests if path == blob_path(host)]
    assert ranges == [None, None, "bytes=1000000-", "bytes=1700000-"]
    assert store.has_blob(digest_of(WEIGHTS))


def test_a_later_pull_goes_on_where_one_has_failed(store: Store, host: FakeHost, tiny: str) -> None:
    host.cuts[blob_path(host)] = [500_000, 0, 0, 0]
    with pytest.raises(UnavailableError, match=r"ended at 500000 of 3000004 bytes"):
        store.pull(tiny)
    assert store.models() == []
    store.pull(tiny)
    ranges = [headers.get("Range") for _, path, headers in host.requests if path == blob_path(host)]
    assert ranges == [None, *["bytes=500000-"] * 4]
    assert store.has_blob(digest_of(WEIGHTS))


def test_a_host_without_ranges_begins_anew(store: Store, host: FakeHost, tiny: str) -> None:
    host.cuts[blob_path(host)] = [1_000_000]
    host.ranges_ignored = True
    store.pull(tiny)
    assert store.has_blob(digest_of(WEIGHTS))


def test_a_wrong_digest_is_refused(store: Store, host: FakeHost, tiny: str) -> None:
    host.files[blob_path(host)] = b"x" * len(WEIGHTS)
    with pytest.raises(DigestError, match="is damaged: expected digest sha256:"):
        store.pull(tiny)
    assert not store.has_blob(digest_of(WEIGHTS))
    assert store.models() == []
    # Of the other files, whose downloads were cancelled, parts may be left.
    assert digest_of(WEIGHTS).replace(":", "-") not in leftovers(store)
    assert not list((store.directory / "claims").iterdir())


def test_a_damaged_partial_file_is_dropped(store: Store, host: FakeHost, tiny: str) -> None:
    partial = store.directory / "partial"
    partial.mkdir(parents=True)
    (partial / digest_of(WEIGHTS).replace(":", "-")).write_bytes(b"x" * 1000)
    store.pull(tiny)
    assert store.has_blob(digest_of(WEIGHTS))


def test_a_pull_is_cancelled_and_resumed(store: Store, host: FakeHost, tiny: str) -> None:
    host.gates[blob_path(host)] = threading.Event()
    has_begun = threading.Event()

    def note(progress: Progress) -> None:
        if progress.completed >= 1_000_000:
            has_begun.set()

    task = StoreTask(note)
    errors: list[BaseException] = []

    def pull() -> None:
        try:
            store.pull(tiny, task=task)
        except ServerError as error:
            errors.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    assert has_begun.wait(30)
    task.cancel()
    host.gates.pop(blob_path(host)).set()
    thread.join(30)
    assert isinstance(errors[0], CancelledError)
    assert store.models() == []
    store.pull(tiny)
    assert any("Range" in headers for _, path, headers in host.requests if path == blob_path(host))


def test_room_is_checked_before_anything_is_fetched(
    store: Store, host: FakeHost, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1_500_000))
    with pytest.raises(StorageFullError, match=r"no space left for the model store .*needs 3.0 MB more, and 1.5 MB"):
        store.pull(tiny)
    assert host.num_requests("GET", blob_path(host)) == 0


def test_a_disk_that_fills_up_is_named(store: Store, host: FakeHost, tiny: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # writes beyond fail as on a full disk
    try:
        with pytest.raises(StorageFullError, match=r"no space left for the model store .* needs \d.\d MB more"):
            store.pull(tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.models() == []
    store.pull(tiny)  # with room again


def test_two_processes_pull_the_same_model(store: Store, host: FakeHost, tiny: str) -> None:
    host.gates[blob_path(host)] = threading.Event()
    code = f"from modelserver.store.store import Store; Store({store.directory!r}).pull({tiny!r})"
    command = [sys.executable, "-c", f"from pathlib import PosixPath; {code}"]
    processes = [subprocess.Popen(command) for _ in range(2)]
    manifest = "/v2/library/tiny/manifests/latest"
    until_true(lambda: host.num_requests("GET", manifest) == 2, "both processes ask for the manifest")
    until_true(lambda: host.num_requests("GET", blob_path(host)) == 1, "one asks for the weights")
    host.gates.pop(blob_path(host)).set()
    assert [process.wait(60) for process in processes] == [0, 0]
    # One fetched it, and the other waited.
    assert host.num_requests("GET", blob_path(host)) == 1
    assert (store.directory / "blobs" / digest_of(WEIGHTS).replace(":", "-")).read_bytes() == WEIGHTS
    assert leftovers(store) == []


def test_collection_spares_a_pull_that_is_under_way(store: Store, host: FakeHost, tiny: str) -> None:
    store.pull(tiny)
    template = digest_of(b"{{ .Prompt }}")
    slow = b"GGUF" + os.urandom(2_000_000)
    host.add_model("library/slow", {MODEL: slow, TEMPLATE: b"{{ .Prompt }}"})
    path = f"/v2/library/slow/blobs/{digest_of(slow)}"
    host.gates[path] = threading.Event()
    thread = threading.Thread(target=store.pull, args=(f"{host.name}/library/slow",))
    thread.start()
    until_true(lambda: host.num_requests("GET", path) == 1, "the weights are asked for")
    other = Store(store.directory)
    other.remove(tiny)
    other.collect()
    # The template is shared with the model that comes; the weights are not.
    assert template in blob_files(store)
    assert digest_of(WEIGHTS) not in blob_files(store)
    host.gates.pop(path).set()
    thread.join(30)
    assert store.describe(f"{host.name}/library/slow").template == "{{ .Prompt }}"


def test_collection_removes_what_nothing_needs(store: Store, host: FakeHost, tiny: str) -> None:
    store.pull(tiny)
    old, new = b"old" * 50, b"new" * 50
    for data in (old, new):
        store.write_blob(digest_of(data), [data])
    os.utime(store.blobs.path(digest_of(old)), (1, 1))
    dead_claim = store.directory / "claims" / "0123"
    dead_claim.write_text(json.dumps([digest_of(old)]))
    assert store.collect() == len(old)
    assert store.has_blob(digest_of(new))
    assert store.has_blob(digest_of(WEIGHTS))
    # With a manifest that cannot be read nothing is known to be unneeded.
    os.utime(store.blobs.path(digest_of(new)), (1, 1))
    broken = store.directory / "manifests" / "a" / "b" / "c" / "d"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    assert store.collect() == 0


HOSTILE = {
    "a path in a title": ({"title": "../../escaped"}, "invalid file name"),
    "an absolute title": ({"title": "/tmp/escaped"}, "invalid file name"),
    "a digest that is a path": ({"digest": "sha256:../../../../escaped"}, "invalid digest"),
    "a digest of another kind": ({"digest": "md5:" + "0" * 32}, "invalid digest"),
    "a negative size": ({"size": -1}, "no valid size"),
    "an absurd size": ({"size": 1 << 60}, "no valid size"),
    "a size that is too small": ({"size": 10}, "sends more than the 10 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_write_nothing(store: Store, host: FakeHost, case: str) -> None:
    change, message = HOSTILE[case]
    layer = {"mediaType": MODEL, **host.add_blob("library/evil", WEIGHTS)}
    title = change.pop("title", "") if "title" in change else ""
    if title:
        layer["annotations"] = {"org.opencontainers.image.title": title}
    host.add_manifest("library/evil", {"schemaVersion": 2, "layers": [layer | change]})
    with pytest.raises(InvalidArgumentError, match=message):
        store.pull(f"{host.name}/library/evil")
    assert store.models() == []
    files = [path for path in store.directory.parent.rglob("*") if path.is_file() and path.name != ".lock"]
    assert files == []


def test_a_size_that_is_too_large_is_no_model(store: Store, host: FakeHost) -> None:
    layer = {"mediaType": MODEL, **host.add_blob("library/evil", WEIGHTS)}
    host.add_manifest("library/evil", {"schemaVersion": 2, "layers": [layer | {"size": len(WEIGHTS) + 1}]})
    with pytest.raises(UnavailableError, match="ended at 3000004 of 3000005 bytes"):
        store.pull(f"{host.name}/library/evil")
    assert store.models() == []


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ({"schemaVersion": 2, "manifests": []}, UnsupportedError, "an index of several images"),
        ({"schemaVersion": 1, "layers": [{}]}, InvalidArgumentError, "schema version 2"),
        (["no"], InvalidArgumentError, "expected a manifest"),
    ],
)
def test_documents_that_are_no_manifests(store: Store, host: FakeHost, document, error, message: str) -> None:
    host.add_manifest("library/evil", document)
    with pytest.raises(error, match=message):
        store.pull(f"{host.name}/library/evil")


def test_code_is_not_fetched(store: Store, host: FakeHost) -> None:
    host.add_model("library/code", [("application/octet-stream", b"import os", "1/model.py")])
    with pytest.raises(PermissionDeniedError, match=r"has the file '1/model.py', which may run code"):
        store.pull(f"{host.name}/library/code")


def test_a_host_without_tls_is_refused(store: Store) -> None:
    with pytest.raises(InvalidArgumentError, match="is without TLS"):
        store.pull("http://example.com/model.gguf")


def test_an_unknown_model_is_named(store: Store, host: FakeHost) -> None:
    with pytest.raises(NotFoundError, match=r"model '.*/library/none:latest' does not exist"):
        store.pull(f"{host.name}/library/none")


def test_models_are_made_from_files_and_models(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(WEIGHTS)
    store.create("base", Recipe(path=path, template="one", system="Be brief.", parameters={"top_k": 1, "stop": ["x"]}))
    store.create("child", Recipe(base="base", template="two", parameters={"top_k": 2}, licenses=["free"]))
    described = store.describe("child")
    assert (described.template, described.system, described.licenses) == ("two", "Be brief.", ["free"])
    assert described.parameters == {"top_k": 2, "stop": ["x"]}
    assert store.describe("base").template == "one"
    # Both have the same weights, which stay as long as one of them does.
    store.remove("base")
    assert store.has_blob(digest_of(WEIGHTS))
    store.remove("child")
    assert blob_files(store) == set()


def test_a_modelfile_names_a_model_and_its_projector(store: Store, tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(WEIGHTS)
    (tmp_path / "sight.gguf").write_bytes(projector_bytes())
    both = Recipe.of(parse_modelfile("FROM ./sight.gguf\nFROM ./weights.gguf"), tmp_path)
    store.create("both", both)
    store.create("alone", Recipe(path=tmp_path / "weights.gguf"))
    store.create("beside", Recipe.of(parse_modelfile("FROM alone\nFROM ./sight.gguf"), tmp_path))
    for name in ("both", "beside"):
        layers = store.read_manifest(name).layers
        assert {(layer.media_type, layer.title) for layer in layers} == {(MODEL, ""), (PROJECTOR, "")}
    for text, message in (
        ("FROM ./sight.gguf", "goes with one model"),
        ("FROM ./weights.gguf\nFROM ./sight.gguf\nFROM ./other.gguf", "there is no file"),
        ("FROM alone\nFROM ./weights.gguf", "is not the GGUF file of a projector"),
        ("FROM alone\nFROM both", "names one model"),
    ):
        with pytest.raises(ServerError, match=message):
            store.create("wrong", Recipe.of(parse_modelfile(text), tmp_path))


def test_a_directory_keeps_the_names_of_its_files(store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    (directory / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json", ".hidden"):
        (directory / name).write_text(name)
    name = store.pull(str(directory))
    assert str(name) == "checkpoint:latest"
    titles = [layer.title for layer in store.read_manifest("checkpoint").layers]
    assert titles == ["1_Pooling/config.json", "config.json", "model.safetensors"]


def test_uploaded_blobs_become_a_model(store: Store) -> None:
    with pytest.raises(DigestError):
        store.write_blob(digest_of(WEIGHTS), [b"other"])
    store.write_blob(digest_of(WEIGHTS), [WEIGHTS[:1000], WEIGHTS[1000:]])
    store.create("uploaded", Recipe(files={"m.gguf": digest_of(WEIGHTS)}))
    assert [layer.media_type for layer in store.read_manifest("uploaded").layers] == [MODEL]
    with pytest.raises(NotFoundError, match="upload it first"):
        store.create("other", Recipe(files={"m.gguf": digest_of(b"absent")}))


def test_a_copy_shares_its_blobs(store: Store, host: FakeHost, tiny: str) -> None:
    store.pull(tiny)
    store.copy(tiny, "mine:v1")
    store.remove(tiny)
    assert [str(each.name) for each in store.models()] == ["mine:v1"]
    assert store.describe("mine:v1").template == "{{ .Prompt }}"
    with pytest.raises(NotFoundError):
        store.copy(tiny, "again")


def test_a_model_is_pushed(store: Store, host: FakeHost, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelserver.store.registry._PART_BYTES", 1_000_000)
    store.pull(tiny)
    pulled = dict(host.files)
    weights = host.files.pop(blob_path(host))
    host.files.pop("/v2/library/tiny/manifests/latest")
    host.token = "secret"
    store.push(tiny)
    assert host.files == pulled
    assert weights == WEIGHTS
    # What was there was not sent.
    assert host.counts["uploads"] == 1
    assert host.num_requests("PATCH", "/uploads/1") == 3


def write_key(home: Path) -> Ed25519PrivateKey:
    """The key of a user, where Ollama keeps it."""
    key = Ed25519PrivateKey.generate()
    (home / ".ollama").mkdir(parents=True)
    content = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (home / ".ollama" / "id_ed25519").write_bytes(content)
    return key


def test_a_push_is_signed_where_the_registry_knows_users_by_keys(
    store: Store, host: FakeHost, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store.pull(tiny)
    manifest = host.files.pop("/v2/library/tiny/manifests/latest")
    host.token, host.signer = "secret", write_key(tmp_path / "home").public_key()
    store.push(tiny)
    assert host.files["/v2/library/tiny/manifests/latest"] == manifest
    stamps = [parse_qs(urlsplit(path).query)["nonce"] for _, path, _ in host.requests if path.startswith("/token")]
    assert len(stamps) == len(set(map(tuple, stamps))) == 2  # to read, and to write


def test_a_push_without_the_right_key_is_denied(
    store: Store, host: FakeHost, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store.pull(tiny)
    host.token, host.signer = "secret", Ed25519PrivateKey.generate().public_key()
    with pytest.raises(PermissionDeniedError):
        store.push(tiny)
    write_key(tmp_path / "home")
    with pytest.raises(PermissionDeniedError):
        store.push(tiny)
    (tmp_path / "home" / ".ollama" / "id_ed25519").write_text("not a key")
    with pytest.raises(InvalidArgumentError, match=r"the key .*id_ed25519 cannot be used"):
        store.push(tiny)

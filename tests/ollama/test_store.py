"""The routes that change the model store, by Ollama's own client and against a registry of this machine."""

from __future__ import annotations

import hashlib
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from support.gguf_models import write_gguf
from support.keys import KeyFile
from support.model_sources import MODEL, FakeHost, fake_host
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint
from support.waiting import until_true

from modelserver.auth.api_keys import Scope
from modelserver.backend.discovery import bundled_module
from modelserver.frontends.ollama.store import QUANTIZATIONS
from modelserver.store.blobs import PartialBlob, StorageFullError

TEMPLATE, PARAMETERS = "application/vnd.ollama.image.template", "application/vnd.ollama.image.params"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("weights")
    return write_gguf(write_checkpoint(root / "source"), root / "tiny.gguf").read_bytes()


@pytest.fixture(scope="module")
def host() -> Iterator[FakeHost]:
    with fake_host() as running:
        yield running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server((), store=str(tmp_path_factory.mktemp("store"))) as running:
        yield running


@pytest.fixture
def client(served: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=f"http://{served.http_url}") as connected:
        yield connected


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=30) as connected:
        yield connected


@pytest.fixture
def tiny(client: ollama.Client, weights: bytes, tmp_path: Path) -> str:
    """A model of the store, made from a blob."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(weights)
    digest = client.create_blob(path)
    client.create("tiny", files={"tiny.gguf": digest}, template="{{ .Prompt }}!", parameters={"num_predict": 2})
    return "tiny"


def names(client: ollama.Client) -> list[str | None]:
    return [each.model for each in client.list().models]


def refused(http: httpx.Client, method: str, path: str, **body: Any) -> tuple[int, str]:
    answer = http.request(method, path, json=body)
    return answer.status_code, answer.json()["error"]


def test_a_model_is_created_shown_asked_copied_and_deleted(
    client: ollama.Client, http: httpx.Client, tiny: str
) -> None:
    (listed,) = [each for each in client.list().models if each.model == "tiny:latest"]
    assert listed.size is not None and listed.size > 1000 and listed.details is not None and listed.digest  # noqa: PT018
    assert listed.details.format == "gguf"
    shown = client.show("tiny")
    assert (shown.template, shown.parameters) == ("{{ .Prompt }}!", "num_predict                    2")
    assert "FROM tiny:latest\n" in (shown.modelfile or "")
    answer = client.chat("tiny", [{"role": "user", "content": "one"}])
    assert answer.eval_count == 2
    assert [each.digest for each in client.ps().models] == [listed.digest]
    assert client.copy("tiny", "team/second:v1").status == "success"
    assert "team/second:v1" in names(client)
    assert client.generate("team/second:v1", "one").eval_count == 2
    assert client.delete("team/second:v1").status == "success"
    assert "team/second:v1" not in names(client)
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.generate("team/second:v1", "one")


def test_a_model_is_made_from_another_with_progress(client: ollama.Client, tiny: str) -> None:
    reports = list(client.create("child", from_=tiny, system="Be brief.", parameters={"stop": ["x"]}, stream=True))
    assert reports[-1].status == "success"
    assert "writing manifest" in [each.status for each in reports]
    shown = client.show("child")
    assert shown.parameters is not None
    assert shown.parameters.splitlines() == ["num_predict                    2", 'stop                           "x"']
    client.delete("child")


def test_a_model_is_quantized_with_progress(client: ollama.Client, http: httpx.Client, tiny: str) -> None:
    reports = list(client.create("few", from_=tiny, quantize="q4_K_M", stream=True))
    (source,) = {each.digest for each in reports if each.status == "quantizing model to Q4_K_M"}
    told = [(each.completed or 0, each.total or 0) for each in reports if each.digest == source]
    assert told[-1][0] == told[-1][1] > 0
    assert reports[-1].status == "success"
    listed = {each.model: each for each in client.list().models}
    few, all_bits = listed["few:latest"], listed["tiny:latest"]
    assert few.details is not None and few.details.quantization_level == "Q4_K_M"  # noqa: PT018
    assert few.size is not None and few.size < (all_bits.size or 0)  # noqa: PT018
    assert client.show("few").template == "{{ .Prompt }}!"
    assert client.generate("few", "one").eval_count == 2
    again = refused(http, "POST", "/api/create", model="fewer", **{"from": "few"}, quantize="q8_0", stream=False)
    assert (again[0], "are quantized already" in again[1]) == (400, True), again
    client.delete("few")


def test_a_checkpoint_of_several_files_becomes_one_in_few_bits(client: ollama.Client, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "source")
    files = {path.name: client.create_blob(path) for path in directory.iterdir() if path.is_file()}
    client.create("one-file", files=files, quantize="Q8_0")
    details = client.show("one-file").details
    assert details is not None and (details.format, details.quantization_level) == ("gguf", "Q8_0")  # noqa: PT018
    assert client.generate("one-file", "one", options={"num_predict": 2}).eval_count == 2
    client.delete("one-file")


def test_adapters_and_a_draft_model_are_parts_of_a_model(
    client: ollama.Client, served: RunningServer, tiny: str, tmp_path: Path
) -> None:
    """A GGUF adapter and the same one in PEFT's files make the same model, and a draft model changes no text."""
    from support.tiny_adapters import write_adapter, write_gguf_adapter

    base = write_checkpoint(tmp_path / "source")
    peft = write_adapter(base, tmp_path / "peft")
    written = write_gguf_adapter(base, peft, tmp_path / "adapter.gguf")
    client.create("tuned", from_=tiny, adapters={"adapter.gguf": client.create_blob(written)})
    files = {path.name: client.create_blob(path) for path in peft.iterdir() if path.suffix in (".json", ".safetensors")}
    client.create("tuned-too", from_=tiny, adapters=files)
    weights = client.create_blob(tmp_path / "tiny.gguf")
    drafted = httpx.post(
        f"http://{served.http_url}/api/create",
        json={"model": "drafted", "from": "tuned", "draft_files": {"small.gguf": weights}, "stream": False},
    )
    assert drafted.json() == {"status": "success"}
    options = {"num_predict": 24, "temperature": 0}
    names = ("tiny", "tuned", "tuned-too", "drafted")
    plain, tuned, again, drafted_text = [client.generate(name, "one", options=options).response for name in names]
    assert tuned == again == drafted_text != plain
    assert "spec_decode_num_drafts_total{" in httpx.get(f"http://{served.metrics_url}/metrics", timeout=30).text
    for name in names[1:]:
        client.delete(name)


def test_the_quantizations_are_those_of_the_quantizer() -> None:
    assert set(QUANTIZATIONS) == set(bundled_module("llm", "gguf_copy").GGUF_METHODS)


def test_a_pull_reports_each_blob(client: ollama.Client, host: FakeHost, weights: bytes) -> None:
    host.add_model("library/pulled", {MODEL: weights, TEMPLATE: b"{{ .Prompt }}?", PARAMETERS: b'{"num_predict":1}'})
    name = f"{host.name}/library/pulled"
    reports = list(client.pull(name, insecure=True, stream=True))
    statuses = [each.status for each in reports]
    assert (statuses[0], statuses[-2:]) == ("pulling manifest", ["writing manifest", "success"])
    blobs = {each.digest: each.completed for each in reports if each.digest}
    assert blobs[f"sha256:{hashlib.sha256(weights).hexdigest()}"] == len(weights)
    assert client.generate(name, "one").eval_count == 1
    assert client.push(name, insecure=True).status == "success"
    client.delete(name)


def test_a_failure_is_the_last_line_or_the_status(client: ollama.Client, http: httpx.Client, host: FakeHost) -> None:
    body = {"model": f"{host.name}/library/none", "insecure": True}
    lines = http.post("/api/pull", json=body).text.splitlines()
    assert lines[0] == '{"status":"pulling manifest"}'
    assert lines[-1].startswith('{"error":')
    status, message = refused(http, "POST", "/api/pull", **body, stream=False)
    assert (status, "none" in message) == (404, True)


def test_a_client_that_leaves_ends_its_pull(served: RunningServer, host: FakeHost, weights: bytes) -> None:
    path = "/v2/library/gated/blobs/"
    host.add_model("library/gated", {MODEL: weights[:-1] + b"x"})
    blob = next(each for each in host.files if each.startswith(path) and len(host.files[each]) > 1000)
    host.gates[blob] = threading.Event()
    body = {"model": f"{host.name}/library/gated", "insecure": True}
    with (
        httpx.Client(base_url=f"http://{served.http_url}", timeout=30) as http,
        http.stream("POST", "/api/pull", json=body) as answer,
    ):
        assert next(answer.iter_lines())
        until_true(lambda: host.num_requests("GET", blob) > 0, "the blob is asked for")
    host.gates[blob].set()
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=30) as http:
        assert f"{host.name}/library/gated:latest" not in [
            each["name"] for each in http.get("/api/tags").json()["models"]
        ]


def test_blobs(http: httpx.Client) -> None:
    digest = f"sha256:{hashlib.sha256(b'text').hexdigest()}"
    assert http.head(f"/api/blobs/{digest}").status_code == 404
    assert http.post(f"/api/blobs/{digest}", content=b"text").status_code == 201
    assert http.post(f"/api/blobs/{digest}", content=b"text").status_code == 200
    assert http.head(f"/api/blobs/{digest}").status_code == 200
    assert http.post(f"/api/blobs/sha256:{'0' * 64}", content=b"text").status_code == 400
    assert http.post("/api/blobs/latest", content=b"text").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "pull", {}, 400, "model is required"),
        ("POST", "pull", {"model": "a b"}, 400, "cannot be its model"),
        ("POST", "pull", {"model": "/etc/passwd"}, 400, "cannot be its"),
        ("POST", "push", {"model": "absent"}, 404, "not found"),
        ("POST", "copy", {"source": "absent", "destination": "x"}, 404, "model 'absent' not found"),
        ("DELETE", "delete", {"model": "absent"}, 404, "model 'absent' not found"),
        ("POST", "create", {"model": "x"}, 400, "neither 'from' or 'files' was specified"),
        (
            "POST",
            "create",
            {"model": "x", "from": "y", "quantize": "q3_K_M"},
            400,
            "unsupported quantization type q3_K_M: this",
        ),
        ("POST", "create", {"model": "x", "from": "tiny", "adapters": {"a": "b"}}, 400, "invalid digest"),
        ("POST", "create", {"model": "x", "modelfile": "FROM tiny\nADAPTER ./a.gguf"}, 400, "name files of the client"),
        ("POST", "create", {"model": "x", "from": "y", "template": "{{ if }}"}, 400, "line 1, column 7"),
        ("POST", "create", {"model": "x", "from": "y", "parameters": {"top_kk": 1}}, 400, "unknown parameter 'top_kk'"),
        ("POST", "create", {"model": "x", "from": "y", "parameters": {"top_k": "z"}}, 400, "invalid integer value 'z'"),
        ("POST", "create", {"model": "x", "modelfile": "SYSTEM hi"}, 400, "no FROM line"),
        ("POST", "create", {"model": "x", "files": {"a.gguf": f"sha256:{'1' * 64}"}}, 404, "is not in the store"),
    ],
)
def test_wrong_requests_are_refused_in_words(
    http: httpx.Client, method: str, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    found = refused(http, method, f"/api/{path}", **body, stream=False)
    assert (found[0], message in found[1]) == (status, True), found


def test_a_server_without_a_store_says_what_to_do(llm_server: RunningServer) -> None:
    with httpx.Client(base_url=f"http://{llm_server.http_url}") as http:
        status, message = refused(http, "POST", "/api/pull", model="tiny")
        assert (status, "start it with --store=DIRECTORY" in message) == (400, True)
        assert http.head(f"/api/blobs/sha256:{'0' * 64}").status_code == 400


def test_keys_change_the_store_if_they_may_load_and_only_their_models(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    asks = keys.add("asks", Scope.INFER)
    loads = keys.add("loads", Scope.ADMIN, models=("mine*",))
    with (
        running_server((), store=str(tmp_path / "store"), api_keys_file=str(keys.path)) as running,
        httpx.Client(base_url=f"http://{running.http_url}") as http,
    ):

        def delete(key: str, model: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return http.request("DELETE", "/api/delete", json={"model": model}, headers=headers).status_code

        assert [delete(asks, "mine"), delete(loads, "yours"), delete(loads, "mine-1")] == [403, 403, 404]


def upload(served: RunningServer, digest: str, length: int | None = None) -> socket.socket:
    """A connection on which a client has begun to send a blob."""
    address, _, port = served.http_url.rpartition(":")
    connection = socket.create_connection((address, int(port)), timeout=30)
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    connection.sendall(f"POST /api/blobs/{digest} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
    return connection


def partial_bytes(store: Path) -> list[int]:
    return [path.stat().st_size for path in (store / "partial").glob("*") if path.exists()]


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server that takes no body of over 64 kB into memory."""
    store = tmp_path_factory.mktemp("tight")
    with running_server((), store=str(store), http_max_input_size=65536) as running:
        yield running, store


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["announced", "chunked"])
def test_a_blob_may_be_larger_than_a_request(tight: tuple[RunningServer, Path], http2: bool, is_chunked: bool) -> None:
    content = (b"http2" if http2 else b"http1") * (600_000 + is_chunked)
    pieces = (content[at : at + 50_000] for at in range(0, len(content), 50_000))
    path = f"/api/blobs/sha256:{hashlib.sha256(content).hexdigest()}"
    with httpx.Client(base_url=f"http://{tight[0].http_url}", timeout=30, http1=not http2, http2=http2) as http:
        answer = http.post(path, content=pieces if is_chunked else content)
        assert (answer.status_code, answer.http_version) == (201, "HTTP/2" if http2 else "HTTP/1.1"), answer.text
        assert http.post(path, content=content).status_code == 200
        assert http.head(path).status_code == 200
        wrong = http.post(f"/api/blobs/sha256:{'2' * 64}", content=content)
        assert (wrong.status_code, "expected digest" in wrong.json()["error"]) == (400, True)
        assert http.post("/api/generate", content=content[:70_000]).status_code == 413
    assert partial_bytes(tight[1]) == []


def test_a_blob_is_on_the_disk_before_its_end_and_leaves_with_its_client(tight: tuple[RunningServer, Path]) -> None:
    served, store = tight
    with upload(served, f"sha256:{'3' * 64}", 1 << 30) as connection:
        connection.sendall(bytes(300_000))
        until_true(lambda: partial_bytes(store) == [300_000], "the part is on the disk")
    until_true(lambda: partial_bytes(store) == [], "the part is removed")


def test_a_blob_without_room_on_the_disk_is_refused_at_once(tight: tuple[RunningServer, Path]) -> None:
    with upload(tight[0], f"sha256:{'4' * 64}", 1 << 60) as connection:
        connection.sendall(b"x")
        answer = connection.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 503")
    assert "no space left for the model store" in answer


def test_a_disk_that_fills_up_ends_the_upload(
    tight: tuple[RunningServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: object, *_: object) -> None:
        raise StorageFullError("no space left for the model store")

    monkeypatch.setattr(PartialBlob, "append", full)
    with upload(tight[0], f"sha256:{'5' * 64}") as connection:
        connection.sendall(b"3\r\nabc\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
    assert partial_bytes(tight[1]) == []


def test_a_slow_disk_holds_the_client_back(tight: tuple[RunningServer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the server's memory nor its queue takes what the disk does not."""
    gate, append = threading.Event(), PartialBlob.append

    def wait(self: PartialBlob, *rest: Any) -> None:
        gate.wait(30)
        append(self, *rest)

    monkeypatch.setattr(PartialBlob, "append", wait)
    content = bytes(64 << 20)
    with upload(tight[0], f"sha256:{hashlib.sha256(content).hexdigest()}", len(content)) as connection:
        num_sent = 0
        while select.select([], [connection], [], 0.3)[1]:
            num_sent += connection.send(content[num_sent : num_sent + 65536])
        assert num_sent < len(content) // 2
        gate.set()
        connection.sendall(content[num_sent:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 201")


def test_an_upload_needs_a_key_that_may_change_the_store(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    asks, loads = keys.add("asks", Scope.INFER), keys.add("loads", Scope.ADMIN)
    content = bytes(1 << 20)
    path = f"/api/blobs/sha256:{hashlib.sha256(content).hexdigest()}"
    with (
        running_server((), store=str(tmp_path / "store"), api_keys_file=str(keys.path)) as running,
        httpx.Client(base_url=f"http://{running.http_url}") as http,
    ):

        def status(key: str) -> int:
            return http.post(path, content=content, headers={"Authorization": f"Bearer {key}"}).status_code

        assert [status(asks), status(loads), status(loads)] == [403, 201, 200]

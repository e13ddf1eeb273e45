"""Every route of every API refuses in the API's own form: without a key, over a quota, for a model that is not there.

The routes, and the form of their errors, are those of `/openapi.json`, so that a new one cannot be missed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest
from support.keys import KeyFile
from support.layouts import ADDRESS, free_port
from support.mock_llm import write_mock_llm
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import SCOPES, Scope
from modelserver.auth.caller_limits import CallerLimits

MAX_BODY_BYTES = 4000
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
# Besides a prompt; each call of a language model ignores the members that it does not know.
OTHERS: dict[str, Any] = {
    "content": "x",
    "tokens": [1],
    "max_tokens": 4,
    "input_suffix": "x",
    "query": "x",
    "documents": [{"text": "x"}],
    "text_1": "x",
    "inputs": {"source_sentence": "x", "sentences": ["x"]},
}
FAMILIES = ("KServe", "OpenAI", "Anthropic", "Ollama", "TGI", "llamacpp")
# Calls that never reach a model, or only its description.
_WITHOUT_MODEL = re.compile(
    r"/v1/(responses|conversations)/.*|/v1/conversations|/v1/(files|batches|audio|images)(/.*)?|/ping|/api/(pull|push|create|copy|blobs/.*)|.*/(apply-template|show|reset|index|(un)?load(_lora_adapter)?|traffic|register|unregister)"
)
# The models here are no classifiers.
_REFUSED = ("/classify", "/predict", "/v1/moderations", "/props", "/lora-adapters", "/slots/{id_slot}", "/infill")


@dataclass(frozen=True)
class Operation:
    """A route as the document has it."""

    url: str
    family: str
    method: str
    pattern: str
    form: jsonschema.Draft202012Validator
    is_keyed: bool

    @property
    def name(self) -> str:
        return f"{self.family}: {self.method} {self.pattern}"

    @property
    def asks_model(self) -> bool:
        """Whether a call with a prompt asks a model."""
        is_asked = self.method == "POST" and not _WITHOUT_MODEL.fullmatch(self.pattern)
        return is_asked and self.pattern not in _REFUSED and not re.search("/v2/(logging|.*trace)", self.pattern)

    def path(self, model: str) -> str:
        path = re.sub("{(name|id)}", model, self.pattern).replace("{version}", "1")
        return re.sub("{.*?}", "x", path)

    def body(self, model: str, text: str = "x", **more: Any) -> dict[str, Any]:
        if self.pattern.endswith("/infer"):
            return {"inputs": [{**TENSOR, "name": "INPUT0"}]}
        if self.pattern.endswith(":predict"):
            return {"instances": [1.0]}
        if re.search("/generate(_stream)?$", self.pattern) and self.pattern.startswith("/v2"):
            return {"text_input": text, "stream": True, **more}
        if self.family == "TGI" and "chat" not in self.pattern:
            return {"model": model, "inputs": text}
        if self.pattern.startswith("/v1/responses"):
            return {"model": model, "input": text, **more}
        said = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
        if self.pattern in ("/v1/embeddings", "/tokenize"):
            del said["messages"]
        return {"model": model, **OTHERS, **said, **more}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    file.add("everything", *SCOPES)
    file.add("none", Scope("score:report"))
    file.add("poor", *SCOPES, limits=CallerLimits(requests_per_second=1e-9))
    return file


@pytest.fixture(scope="module")
def own_ports() -> dict[str, int]:
    return {"tgi": free_port(), "llamacpp": free_port()}


@pytest.fixture(scope="module")
def served(
    keys: KeyFile, own_ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("refusing")
    write_mock_llm(root, "mock")
    write_identity(root, "same")
    write_mock_llm(root, "unloaded")
    options: dict[str, Any] = {
        "api_keys_file": str(keys.path),
        "api": tuple(f"{name}={port}" for name, port in own_ports.items()),
        "http_max_input_size": MAX_BODY_BYTES,
        "model_control_mode": "explicit",
        "load_model": ("mock", "same"),
    }
    with running_server(root, **options) as running:
        yield running


@pytest.fixture(scope="module")
def operations(served: RunningServer, own_ports: dict[str, int], keys: KeyFile) -> list[Operation]:
    urls = [served.http_url, *(f"{ADDRESS}:{port}" for port in own_ports.values())]
    found: dict[str, Operation] = {}
    for url in urls:
        headers = {"x-api-key": keys.texts["everything"]}
        document = httpx.get(f"http://{url}/openapi.json", headers=headers).json()
        for path, item in document["paths"].items():
            for method, described in item.items():
                error = described["responses"]["default"]
                if described["tags"] == ["Models"] or "$ref" not in error:
                    continue
                reference = error["$ref"].rpartition("/")[2]
                schema = document["components"]["schemas"][reference]
                validator = jsonschema.Draft202012Validator(schema)
                family = described["tags"][0]
                found.setdefault(
                    f"{family} {method} {path}",
                    Operation(f"http://{url}", family, method.upper(), path, validator, "security" in described),
                )
    assert {each.family for each in found.values()} >= set(FAMILIES)
    return list(found.values())


class Walk:
    """Sends calls and keeps what is wrong with their answers."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._client = httpx.Client(timeout=30, headers=headers)
        self._problems: list[str] = []
        self._families: set[str] = set()

    def refuses(
        self, operation: Operation, statuses: set[int], model: str = "mock", **content: Any
    ) -> httpx.Response | None:
        """Call it; the answer must have one of the statuses, and the form of the API's errors."""
        answer = self._client.request(operation.method, operation.url + operation.path(model), **content)
        self._families.add(operation.family)
        told = f"{operation.name}: {answer.status_code} {answer.text[:200]}"
        if answer.status_code not in statuses:
            self._problems.append(told)
        elif operation.method == "HEAD":
            pass  # without a body
        elif not answer.headers.get("content-type", "").startswith("application/json"):
            self._problems.append(f"not JSON: {told}")
        elif not operation.form.is_valid(answer.json()):
            self._problems.append(f"of another form: {told}")
        return answer

    def note(self, problem: str) -> None:
        self._problems.append(problem)

    def check(self, families: tuple[str, ...] = FAMILIES) -> None:
        self._client.close()
        assert not self._problems, "\n".join(self._problems)
        assert self._families >= set(families)


def bearer(keys: KeyFile, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {keys.texts[name]}"}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer msk_00000000_wrong"}, {"x-api-key": "wrong"}])
def test_without_a_valid_key(operations: list[Operation], headers: dict[str, str]) -> None:
    walk = Walk(headers)
    for each in operations:
        if each.is_keyed:
            walk.refuses(each, {401}, json=each.body("mock"))
    walk.check()


def test_a_key_without_the_scope(operations: list[Operation], keys: KeyFile) -> None:
    walk = Walk(bearer(keys, "none"))
    for each in operations:
        if each.is_keyed:
            walk.refuses(each, {403}, json=each.body("mock"))
    walk.check()


def test_a_body_that_is_too_large(operations: list[Operation], keys: KeyFile) -> None:
    walk = Walk(bearer(keys, "everything"))
    for each in operations:
        if each.method == "POST" and each.is_keyed:
            # Blobs are as large as the disk of the store has room for; here is none.
            statuses = {400} if "/blobs/" in each.pattern else {413}
            walk.refuses(each, statuses, content=b'{"text": "' + b"x" * MAX_BODY_BYTES + b'"}', headers=JSON)
    walk.check()


JSON = {"Content-Type": "application/json"}


def test_malformed_json(operations: list[Operation], keys: KeyFile) -> None:
    walk = Walk(bearer(keys, "everything"))
    for each in operations:
        if each.asks_model:
            for text in (b'{"prompt": ', b"[1]", b'{"a": "\xff"}', b"[" * 2000):
                walk.refuses(each, {400, 422}, content=text, headers=JSON)
    walk.check()


@pytest.mark.parametrize("model", ["nothing", "unloaded"])
def test_a_model_that_does_not_serve(operations: list[Operation], keys: KeyFile, model: str) -> None:
    walk = Walk(bearer(keys, "everything"))
    for each in operations:
        if each.asks_model:
            # As Triton, KServe's API answers 400 for a model that is not ready.
            walk.refuses(each, {400, 404} if each.family == "KServe" else {404}, model, json=each.body(model))
    walk.check()


def test_a_quota_that_is_used_up(operations: list[Operation], keys: KeyFile) -> None:
    walk = Walk(bearer(keys, "poor"))
    first = {"inputs": [TENSOR]}
    url = operations[0].url
    httpx.post(f"{url}/v2/models/same/infer", json=first, headers=bearer(keys, "poor")).raise_for_status()
    for each in operations:
        if each.asks_model:
            model = "same" if each.pattern.endswith(("/infer", ":predict")) else "mock"
            # Ollama's clients know 503 for a server that has too much to do.
            answer = walk.refuses(each, {503} if each.family == "Ollama" else {429}, model, json=each.body(model))
            if answer is not None and "retry-after" not in answer.headers:
                walk.note(f"{each.name}: no Retry-After")
    walk.check()


def test_a_client_that_leaves_ends_what_it_asked_for(
    operations: list[Operation], served: RunningServer, keys: KeyFile
) -> None:
    script = "do: " + json.dumps({"text": "word", "endless": True})
    families = set()
    with httpx.Client(timeout=30, headers=bearer(keys, "everything")) as client:
        for each in operations:
            if not each.asks_model or not re.search(
                "chat$|completions?$|generate(_stream)?$|messages$|responses$|^/$", each.pattern
            ):
                continue
            if each.pattern.endswith("/generate") and each.family in ("KServe", "TGI"):
                continue  # answered whole
            body = each.body("mock", script, stream=True)
            with client.stream("POST", each.url + each.path("mock"), json=body) as answer:
                assert answer.status_code == 200, (each.name, answer.read())
                next(answer.iter_raw())
            _wait_until_idle(served, each.name)
            families.add(each.family)
    assert families == set(FAMILIES)


def _wait_until_idle(served: RunningServer, name: str) -> None:
    ends_s = time.monotonic() + 20
    while served.call(lambda: served.server.dataplane.load_of("mock").num_inflight):
        assert time.monotonic() < ends_s, f"{name}: the model still works for a client that has left"
        time.sleep(0.01)

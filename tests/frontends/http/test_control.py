from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any, cast

import pytest
from support.echo import echo_dataplane
from support.http_calls import ask, ask_now

from modelserver.app.frontends import http_frontend
from modelserver.errors import NotFoundError, ServerError, UnavailableError
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.planes.control import ControlPlane
from modelserver.repository.state import IndexEntry, ModelState


class RecordingRepository:
    """Remembers what it was asked, but for what was left out; `failure` is raised if set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None

    def index(self, repository: str = "") -> list[IndexEntry]:
        self._record("index", repository, {})
        return [IndexEntry("a", 1, ModelState.READY), IndexEntry("b", None, ModelState.UNKNOWN)]

    async def load(self, name: str, **details: Any) -> None:
        self._record("load", name, details)

    async def unload(self, name: str, **details: Any) -> None:
        self._record("unload", name, details)

    def _record(self, verb: str, name: str, details: dict[str, Any]) -> None:
        self.calls.append((verb, name, {key: value for key, value in details.items() if value}))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def repository() -> RecordingRepository:
    return RecordingRepository()


@pytest.fixture
def frontend(repository: RecordingRepository) -> HttpFrontend:
    return http_frontend(echo_dataplane(), ControlPlane(cast("Any", repository)))


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v2/repository/index", b"", ["a", "b"]),
        ("/v2/repository/index/", b" ", ["a", "b"]),
        ("/v2/repository/index", b'{"ready": false}', ["a", "b"]),
        ("/v2/repository/index", b'{"ready": true}', ["a"]),
    ],
)
def test_index(frontend: HttpFrontend, path: str, body: bytes, names: list[str]) -> None:
    answer = ask_now(frontend, "POST", path, body)
    assert answer.status == 200
    assert [row["name"] for row in answer.json()] == names


async def test_load_hands_over_config_and_files(frontend: HttpFrontend, repository: RecordingRepository) -> None:
    parameters = {"config": '{"backend": "x"}', "file:1/model.onnx": base64.b64encode(b"\0weights").decode()}
    answer = await ask(
        frontend, "POST", "/v2/repository/models/m/load", json.dumps({"parameters": parameters}).encode()
    )
    assert answer.status == 200
    details = {"config_json": '{"backend": "x"}', "files": {"1/model.onnx": b"\0weights"}}
    assert repository.calls == [("load", "m", details)]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"parameters": null}', b'{"name": "m", "load": true}'])
async def test_load_needs_no_parameters(frontend: HttpFrontend, repository: RecordingRepository, body: bytes) -> None:
    assert (await ask(frontend, "POST", "/v2/repository/models/m/load", body)).status == 200
    assert repository.calls == [("load", "m", {})]


async def test_unload(frontend: HttpFrontend, repository: RecordingRepository) -> None:
    body = gzip.compress(b'{"parameters": {"unload_dependents": true}}')
    headers = {"content-encoding": "gzip"}
    assert (await ask(frontend, "POST", "/v2/repository/models/m/unload", body, headers)).status == 200
    assert repository.calls == [("unload", "m", {"unload_dependents": True})]


@pytest.mark.parametrize("path", ["/v2/repository/models/m/versions/3", "/v2/repository/models/m/versions/3/"])
@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_a_version_is_a_part_of_the_path(
    frontend: HttpFrontend, repository: RecordingRepository, path: str, verb: str
) -> None:
    assert (await ask(frontend, "POST", f"{path.rstrip('/')}/{verb}")).status == 200
    assert repository.calls == [(verb, "m", {"version": 3})]


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize(("failure", "status"), [(NotFoundError("gone"), 404), (UnavailableError("gone"), 503)])
async def test_failures_are_answered(
    frontend: HttpFrontend, repository: RecordingRepository, verb: str, failure: ServerError, status: int
) -> None:
    repository.failure = failure
    answer = await ask(frontend, "POST", f"/v2/repository/models/m/{verb}", b"")
    assert (answer.status, answer.error) == (status, "gone")


async def test_an_unexpected_failure_is_answered(frontend: HttpFrontend, repository: RecordingRepository) -> None:
    repository.failure = KeyError("x")
    assert (await ask(frontend, "POST", "/v2/repository/models/m/load", b"")).status == 500


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("models/m/load", ("load", "m", {"repository": "r"})),
        ("models/m/versions/2/unload", ("unload", "m", {"repository": "r", "version": 2})),
        ("index", ("index", "r", {})),
    ],
)
async def test_a_repository_may_be_named(
    frontend: HttpFrontend, repository: RecordingRepository, path: str, call: tuple[Any, ...]
) -> None:
    assert (await ask(frontend, "POST", f"/v2/repository/r/{path}", b"")).status == 200
    assert repository.calls == [call]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v2/repository/index", b"[]", "object"),
        ("/v2/repository/index", b"{", "malformed"),
        ("/v2/repository/index", b"\xff", "malformed"),
        ("/v2/repository/index", b'{"ready": 1}', "'ready'"),
        (
            "/v2/repository/index",
            b'{"a":' * 101 + b"1" + b"}" * 101,
            "JSON nesting depth exceeds maximum allowed limit",
        ),
        ("/v2/repository/models/m/load", b'{"parameters": []}', "'parameters'"),
        ("/v2/repository/models/m/load", b'{"parameters": {"config": {}}}', "'config'"),
        ("/v2/repository/models/m/load", b'{"parameters": {"file:1/x": "%%%"}}', "'file:1/x'.*base64"),
        ("/v2/repository/models/m/load", b'{"parameters": {"file:1/x": "\xc3\xa9"}}', "'file:1/x'.*base64"),
        ("/v2/repository/models/m/load", b'{"parameters": {"file:1/x": 1}}', "'file:1/x'.*content"),
        ("/v2/repository/models/m/load", b'{"parameters": {"other": 1}}', "'other'"),
        ("/v2/repository/models/..%2fm/load", b"{}", "name"),
    ],
)
async def test_wrong_bodies_are_refused(
    frontend: HttpFrontend, repository: RecordingRepository, path: str, body: bytes, message: str
) -> None:
    answer = await ask(frontend, "POST", path, body)
    assert answer.status == 400
    assert re.search(message, answer.error)
    assert not repository.calls

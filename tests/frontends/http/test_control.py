from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from support.echo import echo_dataplane
from support.http_calls import ask, ask_now

from modelserver.errors import NotFoundError, ServerError, UnavailableError
from modelserver.frontends.http.routes import HttpFrontend
from modelserver.repository.state import IndexEntry, ModelState


class RecordingControlPlane:
    """Remembers what it was asked; `failure` is raised if set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None

    def index(self, ready_only: bool = False, repository_name: str = "") -> list[IndexEntry]:
        self._record("index", ready_only, repository_name)
        return [IndexEntry("m", 1, ModelState.READY)]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._record("load", name, dict(parameters))

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._record("unload", name, dict(parameters))

    def _record(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def controlplane() -> RecordingControlPlane:
    return RecordingControlPlane()


@pytest.fixture
def frontend(controlplane: RecordingControlPlane) -> HttpFrontend:
    return HttpFrontend(echo_dataplane(), controlplane)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("/v2/repository/index", b"", ("index", False, "")),
        ("/v2/repository/index/", b" ", ("index", False, "")),
        ("/v2/repository/index", b'{"ready": true}', ("index", True, "")),
        ("/v2/repository/models/index", b"{}", ("index", False, "models")),
        ("/v2/repository/other/index", b"{}", ("index", False, "other")),
    ],
)
def test_index(
    frontend: HttpFrontend, controlplane: RecordingControlPlane, path: str, body: bytes, call: tuple[Any, ...]
) -> None:
    answer = ask_now(frontend, "POST", path, body)
    assert (answer.status, answer.json()) == (200, [{"name": "m", "version": "1", "state": "READY"}])
    assert controlplane.calls == [call]


async def test_load_hands_over_config_and_files(frontend: HttpFrontend, controlplane: RecordingControlPlane) -> None:
    parameters = {"config": '{"backend": "x"}', "file:1/model.onnx": base64.b64encode(b"\0weights").decode()}
    answer = await ask(
        frontend, "POST", "/v2/repository/models/m/load", json.dumps({"parameters": parameters}).encode()
    )
    assert answer.status == 200
    assert controlplane.calls == [
        ("load", "m", {"config": '{"backend": "x"}', "file:1/model.onnx": b"\0weights"}),
    ]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"parameters": null}', b'{"name": "m", "load": true}'])
async def test_load_needs_no_parameters(
    frontend: HttpFrontend, controlplane: RecordingControlPlane, body: bytes
) -> None:
    assert (await ask(frontend, "POST", "/v2/repository/models/m/load", body)).status == 200
    assert controlplane.calls == [("load", "m", {})]


async def test_unload(frontend: HttpFrontend, controlplane: RecordingControlPlane) -> None:
    body = gzip.compress(b'{"parameters": {"unload_dependents": true}}')
    headers = {"content-encoding": "gzip"}
    assert (await ask(frontend, "POST", "/v2/repository/models/m/unload", body, headers)).status == 200
    assert controlplane.calls == [("unload", "m", {"unload_dependents": True})]


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize(("failure", "status"), [(NotFoundError("gone"), 404), (UnavailableError("gone"), 503)])
async def test_failures_are_answered(
    frontend: HttpFrontend, controlplane: RecordingControlPlane, verb: str, failure: ServerError, status: int
) -> None:
    controlplane.failure = failure
    answer = await ask(frontend, "POST", f"/v2/repository/models/m/{verb}", b"")
    assert (answer.status, answer.error) == (status, "gone")


async def test_an_unexpected_failure_is_answered(frontend: HttpFrontend, controlplane: RecordingControlPlane) -> None:
    controlplane.failure = KeyError("x")
    assert (await ask(frontend, "POST", "/v2/repository/models/m/load", b"")).status == 500


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_naming_a_repository_is_unsupported(
    frontend: HttpFrontend, controlplane: RecordingControlPlane, verb: str
) -> None:
    answer = await ask(frontend, "POST", f"/v2/repository/r/models/m/{verb}", b"")
    assert answer.status == 501
    assert "'r'" in answer.error
    assert not controlplane.calls


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v2/repository/index", b"[]", "object"),
        ("/v2/repository/index", b"{", "malformed"),
        ("/v2/repository/index", b"\xff", "malformed"),
        ("/v2/repository/index", b'{"ready": 1}', "'ready'"),
        ("/v2/repository/index", b'{"a":' * 101 + b"1" + b"}" * 101, "deeper than 100"),
        ("/v2/repository/models/m/load", b'{"parameters": []}', "'parameters'"),
        ("/v2/repository/models/m/load", b'{"parameters": {"config": {}}}', "'config'"),
        ("/v2/repository/models/m/load", b'{"parameters": {"file:1/x": "%%%"}}', "'file:1/x'.*base64"),
        ("/v2/repository/models/m/load", b'{"parameters": {"file:1/x": "\xc3\xa9"}}', "'file:1/x'.*base64"),
        ("/v2/repository/models/m/load", b'{"parameters": {"file:1/x": 1}}', "'file:1/x'.*base64"),
    ],
)
async def test_wrong_bodies_are_refused(
    frontend: HttpFrontend, controlplane: RecordingControlPlane, path: str, body: bytes, message: str
) -> None:
    answer = await ask(frontend, "POST", path, body)
    assert answer.status == 400
    assert re.search(message, answer.error)
    assert not controlplane.calls

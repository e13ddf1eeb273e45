"""Loading and unloading one version of a model, the same over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.control_calls import control_model, list_index
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout


@pytest.fixture
def explicit(tmp_path: Path) -> Iterator[RunningServer]:
    """A model of three versions, of which the policy serves the last."""
    repository = tmp_path / "models"
    write_identity(repository, "echo", versions=(1, 2, 3))
    with running_server(repository, model_control_mode="explicit", load_model=("echo",)) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], explicit: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(explicit) as connected:
        yield connected


def answering(client: ProtocolClient, version: str = "") -> str:
    return client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)}, version=version).model_version


def states(running: RunningServer, protocol: type[ProtocolClient]) -> dict[str, str]:
    return {row["version"]: row["state"] for row in list_index(running, protocol)}


@pytest.mark.parametrize("version", [1, "1"])
def test_a_version_is_loaded_and_unloaded_beside_the_others(
    explicit: RunningServer, protocol: type[ProtocolClient], client: ProtocolClient, version: Any
) -> None:
    with pytest.raises(ClientError) as refused:
        answering(client, "1")
    assert refused.value.code is ErrorCode.NOT_FOUND
    control_model(explicit, protocol, "load", "echo", version=version)
    assert (answering(client, "1"), answering(client)) == ("1", "3")
    assert client.model_metadata("echo")["versions"] == ["1", "3"]
    assert states(explicit, protocol) == {"1": "READY", "3": "READY"}

    control_model(explicit, protocol, "unload", "echo", version=3)
    assert answering(client) == "1"
    assert not client.is_model_ready("echo", "3")
    while states(explicit, protocol)["3"] == "UNLOADING":
        continue
    assert states(explicit, protocol) == {"1": "READY", "3": "UNAVAILABLE"}

    client.load("echo")
    assert client.model_metadata("echo")["versions"] == ["3"]


def test_what_is_refused(explicit: RunningServer, protocol: type[ProtocolClient]) -> None:
    with pytest.raises(ClientError, match="has no version 9") as missing:
        control_model(explicit, protocol, "load", "echo", version=9)
    assert missing.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(ClientError, match="expected the number of a version, got 'one'") as wrong:
        control_model(explicit, protocol, "unload", "echo", version="one")
    assert wrong.value.code is ErrorCode.INVALID_ARGUMENT


def test_http_has_paths_of_versions(explicit: RunningServer) -> None:
    models = f"http://{explicit.http_url}/v2/repository/models"
    assert httpx.post(f"{models}/echo/versions/2/load").status_code == 200
    assert explicit.call(lambda: explicit.server.repository.ready_versions("echo")) == (2, 3)
    assert httpx.post(f"{models}/echo/versions/3/unload").status_code == 200
    assert explicit.call(lambda: explicit.server.repository.ready_versions("echo")) == (2,)
    conflict = httpx.post(f"{models}/echo/versions/3/unload", json={"parameters": {"version": "2"}})
    assert (conflict.status_code, "the path says version 3" in conflict.text) == (400, True)
    assert httpx.post(f"{models}/echo/versions/two/load").status_code == 404

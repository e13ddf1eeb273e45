"""The logging extension over both protocols: what is logged changes while the server runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.app.logs import start_logs
from modelserver.errors import ErrorCode
from modelserver.options.server_options import ServerOptions

START = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[RunningServer]:
    write_identity(tmp_path, "echo")
    with running_server(tmp_path) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def _settings(client: ProtocolClient, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    method = client.raw.get_log_settings if changes is None else client.raw.update_log_settings
    answer: Any = client._call(method, *([] if changes is None else [changes]))
    if client.name == "http":
        return dict(answer)
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in answer.settings.items()}


def test_settings_are_read_and_changed(client: ProtocolClient) -> None:
    assert _settings(client) == START
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert _settings(client, changes) == START | changes
    assert _settings(client) == START | changes
    assert _settings(client, {"log_format": "json"})["log_format"] == "json"


def test_the_log_follows(client: ProtocolClient, served: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "log"
    writer = start_logs(ServerOptions(log_file=str(file)))
    try:
        served.server.controlplane.logs.follow(writer.apply)
        client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)}, request_id="before")
        _settings(client, {"log_verbose_level": 1, "log_format": "json"})
        client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)}, request_id="during")
        _settings(client, {"log_verbose_level": 0})
        client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)}, request_id="after")
    finally:
        writer.close()
    text = file.read_text()
    assert "during" in text
    assert "before" not in text
    assert "after" not in text
    assert all(line.startswith('{"time"') for line in text.splitlines() if "during" in line)


def test_the_file_is_not_a_clients_to_choose(client: ProtocolClient) -> None:
    with pytest.raises(ClientError, match="log file location can not be updated") as caught:
        _settings(client, {"log_file": "/tmp/log", "log_info": False})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert _settings(client) == START


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"log_infos": True}, "unknown log setting 'log_infos'.*did you mean 'log_info'"),
        ({"log_format": "loud"}, "'log_format' must be one of default, ISO8601, json"),
    ],
)
def test_what_is_no_setting_changes_nothing(client: ProtocolClient, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ClientError, match=text) as caught:
        _settings(client, changes)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert _settings(client) == START


@pytest.mark.parametrize(
    "changes", [{"log_info": 1}, {"log_error": "true"}, {"log_verbose_level": -1}, {"log_verbose_level": True}]
)
def test_values_have_the_type_of_their_setting(served: RunningServer, changes: dict[str, Any]) -> None:
    url = f"http://{served.http_url}/v2/logging"
    answer = httpx.post(url, json=changes)
    assert answer.status_code == 400
    assert "must be" in answer.json()["error"]
    assert httpx.post(url, json={"log_info": None}).json() == START
    assert httpx.post(url).json() == START

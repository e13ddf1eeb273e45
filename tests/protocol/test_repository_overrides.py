"""Overrides that survive a restart, the same over both protocols."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.control_calls import control_model, list_index
from support.model_files import write_identity
from support.serving import running_server


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    write_identity(tmp_path / "models", "echo")
    return {
        "repository": tmp_path / "models",
        "model_control_mode": "explicit",
        "load_model": ("echo",),
        "override_directory": str(tmp_path / "kept"),
    }


def test_an_override_is_kept_and_forgotten(options: dict[str, Any], protocol: type[ProtocolClient]) -> None:
    with running_server(**options) as running, protocol(running) as client:
        config = client.model_config("echo") | {"max_batch_size": 3}
        weights: Any = base64.b64encode(b"kept").decode() if protocol.name == "http" else b"kept"
        details = {"config": json.dumps(config), "file:7/weights": weights}
        control_model(running, protocol, "load", "echo", **details, persist=True)
    with running_server(**options) as running, protocol(running) as client:
        assert client.model_config("echo")["max_batch_size"] == 3
        answer = client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)})
        assert answer.model_version == "7"
        (row,) = list_index(running, protocol)
        assert row["reason"].startswith("overridden, also after a restart: all files: 1 in place of the directory")
        assert "max_batch_size: 8 -> 3" in row["reason"]
        control_model(running, protocol, "load", "echo", persist=False)
        assert client.model_config("echo")["max_batch_size"] == 8
    with running_server(**options) as running, protocol(running) as client:
        assert client.model_metadata("echo")["versions"] == ["1"]
        (row,) = list_index(running, protocol)
        assert row["reason"] == ""


def test_keeping_needs_an_override_and_a_place(options: dict[str, Any], protocol: type[ProtocolClient]) -> None:
    with running_server(**options) as running:
        with pytest.raises(ClientError, match="there is no override to keep"):
            control_model(running, protocol, "load", "echo", persist=True)
        with pytest.raises(ClientError, match="'persist': expected a boolean, got a string"):
            control_model(running, protocol, "load", "echo", persist="yes")
    without = options | {"override_directory": ""}
    with running_server(**without) as running, pytest.raises(ClientError, match="--override-directory"):
        control_model(running, protocol, "load", "echo", config="{}", persist=True)

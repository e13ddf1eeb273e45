"""A repository in an object store as clients see it, the same over both protocols."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.cloud import MemoryBucket, memory_bucket
from support.control_calls import list_index
from support.serving import running_server

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    with memory_bucket("wire") as bucket:
        bucket.write_model("echo")
        yield bucket


@pytest.fixture
def options(bucket: MemoryBucket, tmp_path: Path) -> dict[str, Any]:
    return {"repository": bucket.uri.text, "cloud_cache_directory": str(tmp_path / "cache")}


def infer(client: ProtocolClient) -> str:
    return client.infer("echo", {"INPUT0": np.ones((1, 1), np.int32)}).model_version


def test_models_are_loaded_and_reloaded_on_request(
    bucket: MemoryBucket, options: dict[str, Any], protocol: type[ProtocolClient]
) -> None:
    explicit = {"model_control_mode": "explicit", "load_model": ("echo",)}
    with running_server(**options, **explicit) as running, protocol(running) as client:
        assert infer(client) == "1"
        bucket.write_model("echo", versions=(2,))
        bucket.write_model("later")
        client.load("echo")
        client.load("later")
        assert infer(client) == "2"
        assert {(row["name"], row["state"]) for row in list_index(running, protocol)} >= {
            ("echo", "READY"),
            ("later", "READY"),
        }
        bucket.write("echo/config.pbtxt", "nonsense")
        with pytest.raises(ClientError, match="nonsense"):
            client.load("echo")
        assert infer(client) == "2"
        with pytest.raises(ClientError, match="memory://wire/models") as missing:
            client.load("nobody")
        assert missing.value.code is ErrorCode.NOT_FOUND


def test_polling_follows_the_store(
    bucket: MemoryBucket, options: dict[str, Any], protocol: type[ProtocolClient]
) -> None:
    with (
        running_server(**options, model_control_mode="poll", repository_poll_secs=1) as running,
        protocol(running) as client,
    ):
        bucket.write_model("echo", versions=(2,))
        deadline_s = time.monotonic() + 20
        while infer(client) != "2":
            assert time.monotonic() < deadline_s, "the change was not followed"
            time.sleep(0.05)

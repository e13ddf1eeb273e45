"""Sequences that are under way while their model is replaced, unloaded, or the whole server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.gate import until
from support.sequences import add, write_sequence_model
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

IDLE_US = 300_000


@pytest.fixture
def running(layout: str, tmp_path: Path) -> Iterator[RunningServer]:
    write_sequence_model(tmp_path, "sums", "oldest { }", idle_us=IDLE_US)
    with running_server(tmp_path, model_control_mode="explicit", load_model=("*",), exit_timeout_secs=20) as server:
        yield server


@pytest.fixture
def client(protocol: type[ProtocolClient], running: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(running) as connected:
        yield connected


def version_of(client: ProtocolClient, sequence_id: int, number: int, flags: str) -> tuple[str, int]:
    answer = client.infer(
        "sums",
        {"INPUT": np.array([[number]], np.int32)},
        sequence_id=sequence_id,
        sequence_start="+" in flags,
        sequence_end="-" in flags,
    )
    return answer.model_version, int(answer["OUTPUT"].item())


def test_a_sequence_goes_on_where_it_began(client: ProtocolClient, tmp_path: Path) -> None:
    assert version_of(client, 1, 1, "+") == ("1", 1)
    write_sequence_model(tmp_path, "sums", "oldest { }", idle_us=IDLE_US, versions=(2,))
    client.load("sums")
    assert version_of(client, 1, 2, "") == ("1", 3)
    assert version_of(client, 2, 10, "+") == ("2", 10)
    assert version_of(client, 1, 3, "-") == ("1", 6)
    assert version_of(client, 2, 20, "-") == ("2", 30)
    # The id is free now, and the old version has nobody left.
    assert version_of(client, 1, 1, "+-") == ("2", 1)


def test_a_start_leaves_the_old_version(client: ProtocolClient, tmp_path: Path) -> None:
    assert version_of(client, 1, 1, "+") == ("1", 1)
    write_sequence_model(tmp_path, "sums", "oldest { }", idle_us=IDLE_US, versions=(2,))
    client.load("sums")
    assert version_of(client, 1, 5, "+") == ("2", 5)
    assert version_of(client, 1, 5, "-") == ("2", 10)


def test_an_unloaded_model_finishes_its_sequences(client: ProtocolClient, running: RunningServer) -> None:
    add(client, "sums", 1, 1, "+")
    add(client, "sums", 2, 1, "+")
    client.unload("sums")
    with pytest.raises(ClientError) as caught:
        add(client, "sums", 3, 1, "+")
    assert caught.value.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)
    assert add(client, "sums", 1, 1, "-") == 2
    # The other one is silent, and ends by that.
    running.call(
        lambda: until(
            lambda: [entry.state.name for entry in running.server.repository.index()] == ["UNAVAILABLE"], "gone"
        )
    )
    with pytest.raises(ClientError):
        add(client, "sums", 2, 1)


@pytest.mark.direct
def test_a_server_that_stops_lets_sequences_end(client: ProtocolClient, running: RunningServer) -> None:
    add(client, "sums", 1, 1, "+")
    stopping = asyncio.run_coroutine_threadsafe(running.server.stop(), running.loop)
    running.call(lambda: until(lambda: running.server.dataplane.is_shutting_down, "stopping"))
    with pytest.raises(ClientError) as caught:
        add(client, "sums", 2, 1, "+")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert not client.is_ready()
    assert add(client, "sums", 1, 1) == 2
    assert add(client, "sums", 1, 1, "-") == 3
    stopping.result(10)
    assert not running.server.is_abandoned

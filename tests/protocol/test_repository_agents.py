"""What a client sees of repository agents, the same over both protocols."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_identity
from support.serving import running_server

from modelserver.errors import ErrorCode

AGENT = """
from modelserver.repoagent import RepositoryAgent

class AGENT(RepositoryAgent):
    def load(self):
        target = self.context.workspace / "model"
        (target / "9").mkdir(parents=True)
        config = (self.context.model_directory / "config.pbtxt").read_text()
        (target / "config.pbtxt").write_text(config.replace("max_batch_size: 8", "max_batch_size: 5"))
        return target
"""


def naming(agent: str, key: str = "k", value: str = "v") -> str:
    return f'model_repository_agents {{ agents {{ name: "{agent}" parameters {{ key: "{key}" value: "{value}" }} }} }}'


def test_a_wrong_checksum_is_told_and_what_serves_goes_on(tmp_path: Path, protocol: type[ProtocolClient]) -> None:
    weights = write_identity(tmp_path / "models", "echo") / "1" / "weights"
    weights.write_bytes(b"right")
    good, bad = (hashlib.md5(content).hexdigest() for content in (b"right", b"wrong"))
    write_identity(tmp_path / "models", "echo", more=naming("checksum", "MD5:1/weights", good))
    with (
        running_server(tmp_path / "models", model_control_mode="explicit", load_model=("echo",)) as running,
        protocol(running) as client,
    ):
        weights.write_bytes(b"wrong")
        with pytest.raises(ClientError, match=f"for file 1/weights, expect: {good}, got: {bad}") as failed:
            client.load("echo")
        assert failed.value.code is ErrorCode.INVALID_ARGUMENT
        assert client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)})["OUTPUT0"].item() == 1
        (row,) = client.index()
        assert (row["state"], good in row["reason"]) == ("READY", True)
        weights.write_bytes(b"right")
        client.load("echo")


def test_an_agent_of_the_operator_replaces_the_model(tmp_path: Path, protocol: type[ProtocolClient]) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "swap.py").write_text(AGENT)
    write_identity(tmp_path / "models", "echo", more=naming("swap"))
    with (
        running_server(tmp_path / "models", repoagent_directory=str(tmp_path / "agents")) as running,
        protocol(running) as client,
    ):
        assert client.model_metadata("echo")["versions"] == ["9"]
        assert client.model_config("echo")["max_batch_size"] == 5

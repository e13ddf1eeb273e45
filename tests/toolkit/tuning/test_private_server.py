"""A server for one run: it serves the model, and is gone afterwards."""

from pathlib import Path

import psutil
import pytest
from support.model_files import write_identity

from modelserver.client.endpoint import endpoint_at
from modelserver.client.server_client import ServerClient
from modelserver.errors import UnavailableError
from modelserver.toolkit.tuning.private_server import private_server


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_it_serves_one_model_and_ends(tmp_path: Path) -> None:
    write_identity(tmp_path, "echo")
    write_identity(tmp_path, "other")
    before = children()
    with private_server(tmp_path, "echo") as url:
        states = {row["name"]: row.get("state") for row in ServerClient(url).index()}
        assert states["echo"] == "READY"
        assert states["other"] != "READY"
        assert len(children() - before) == 1
    assert children() == before
    with private_server(tmp_path, "echo", is_grpc=True) as url:
        assert endpoint_at(url, is_grpc=True).control().model_config("echo")["name"] == "echo"


def test_what_keeps_it_from_serving_is_told(tmp_path: Path) -> None:
    directory = write_identity(tmp_path, "bad")
    (directory / "config.pbtxt").write_text('backend: "no_such_backend"')
    before = children()
    with pytest.raises(UnavailableError, match="no_such_backend"), private_server(tmp_path, "bad"):
        pass
    with (
        pytest.raises(UnavailableError, match="unknown flag '--no-such-flag'"),
        private_server(tmp_path, "bad", ["--no-such-flag=1"]),
    ):
        pass
    assert children() == before

"""TensorRT models among others on a server without a GPU: each says what it lacks, and nobody else notices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.engines import plan_bytes
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server

pytestmark = pytest.mark.tool("no-gpu")

SHAPED = """
    backend: "tensorrt" max_batch_size: 8
    input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] },
            { name: "shape" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
    instance_group [ { profile: [ "0", "1" ] } ]
    optimization { cuda { graphs: true } priority: PRIORITY_MAX }
    cc_model_filenames { key: "9.0" value: "hopper.plan" }
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_repository: Path) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("repository")
    write_identity(root)
    shutil.copytree(model_repository / "digits_tensorrt", root / "digits_tensorrt")
    write_model(root, "cut_off", 'backend: "tensorrt"')
    (root / "cut_off/1/model.plan").write_bytes(plan_bytes()[:100])
    write_model(root, "shaped", SHAPED)
    (root / "shaped/1/model.plan").write_bytes(plan_bytes())
    (root / "unnamed/1").mkdir(parents=True)
    (root / "unnamed/1/model.plan").write_bytes(plan_bytes())
    with running_server(root) as server:
        yield server


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def test_each_says_what_it_lacks_and_the_others_answer(client: ProtocolClient) -> None:
    reasons = {row["name"]: row.get("reason", "") for row in client.index() if row.get("state") != "READY"}
    assert "the file was cut off" in reasons["cut_off"]
    assert "supports only GPU device" in reasons["shaped"]
    # Recognised by its file; what it takes is known on a GPU only.
    assert "tells its inputs and outputs on a GPU only" in reasons["unnamed"]
    assert client.is_model_ready("identity")
    with pytest.raises(ClientError, match="supports only GPU device"):
        client.infer("digits_tensorrt", {"image": np.zeros((1, 8, 8), np.float32)})
    assert not client.is_model_ready("digits_tensorrt")
    assert client.is_model_ready("identity")


def test_the_example_holds_nothing_back(protocol: type[ProtocolClient], tmp_path: Path, model_repository: Path) -> None:
    shutil.copytree(model_repository / "digits_tensorrt", tmp_path / "digits_tensorrt")
    write_identity(tmp_path)
    with running_server(tmp_path, exit_on_error=True) as server, protocol(server) as client:
        assert client.is_ready()
        with pytest.raises(ClientError, match="supports only GPU device"):
            client.infer("digits_tensorrt", {"image": np.zeros((1, 8, 8), np.float32)})
        assert client.is_ready()

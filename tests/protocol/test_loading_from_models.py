"""Python models whose `initialize` loads other models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_model
from support.serving import RunningServer, running_server

pytestmark = pytest.mark.one_layout

LOADER = """
import triton_python_backend_utils as pb_utils

OTHERS = {"circle_a": "circle_b", "circle_b": "circle_c", "circle_c": "circle_a", "first": "second"}

class TritonPythonModel:
    async def initialize(self, args):
        if args["model_name"] in OTHERS:
            pb_utils.load_model(OTHERS[args["model_name"]])

    def execute(self, requests): ...
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("loading")
    for name in ("circle_a", "circle_b", "circle_c", "first", "second"):
        (write_model(root, name, 'backend: "python"') / "1" / "model.py").write_text(LOADER)
    with running_server(root, model_control_mode="explicit") as running:
        yield running


def test_a_model_may_load_what_it_needs(protocol: type[ProtocolClient], server: RunningServer) -> None:
    with protocol(server) as client:
        client.load("first")
        assert client.is_model_ready("second")
        client.unload("first")
        client.unload("second")


def test_models_that_load_each_other_in_a_circle_are_refused(
    protocol: type[ProtocolClient], server: RunningServer
) -> None:
    chain = "circle_c -> circle_a -> circle_b -> circle_c"
    with protocol(server) as client, pytest.raises(ClientError, match=f"'circle_a' is being loaded, .*{chain}"):
        client.load("circle_a")

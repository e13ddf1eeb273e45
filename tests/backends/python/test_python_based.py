"""A directory with a model.py among the backends: the Python model of all models that name it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.clients import HttpClient
from support.serving import running_server

from modelserver.backend.discovery import find_backend, list_backends
from modelserver.errors import NotFoundError

SOURCE = """
import json
import os
import numpy as np
import triton_python_backend_utils as pb_utils
import beside


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "factor.json")) as file:
            self.factor = json.load(file)

    def execute(self, requests):
        scaled = [request.inputs()[0].as_numpy() * self.factor + beside.BIAS for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", data.astype(np.float32))]) for data in scaled]
"""


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    directory = tmp_path / "backends" / "scaling"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(SOURCE)
    (directory / "beside.py").write_text("BIAS = 100\n")
    return tmp_path / "backends"


def test_it_is_found_and_listed(backends: Path) -> None:
    found = find_backend("scaling", backend_directories=[backends])
    assert found is find_backend("scaling", backend_directories=[backends])
    assert found is not find_backend("python")
    assert any(listing.name == "scaling" for listing in list_backends([backends]))
    with pytest.raises(NotFoundError):
        find_backend("other", backend_directories=[backends])


@pytest.mark.parametrize("config", ['backend: "scaling"', 'backend: "scaling"\nruntime: "model.py"'])
def test_its_models_bring_only_their_files(tmp_path: Path, backends: Path, config: str) -> None:
    root = tmp_path / "models"
    for name, factor in (("double", 2), ("triple", 3)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        (root / name / "1" / "factor.json").write_text(str(factor))
    with running_server(root, backend_directory=(str(backends),)) as running, HttpClient(running) as client:
        for name, expected in (("double", [102.0, 104.0]), ("triple", [103.0, 106.0])):
            answer = client.infer(name, {"X": np.array([1, 2], np.float32)})
            assert answer["Y"].tolist() == expected

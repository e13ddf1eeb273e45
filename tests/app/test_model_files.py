"""Single files of models, of any name, served as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from support.gguf_models import write_gguf
from support.serving import running_server
from support.tiny_checkpoints import write_checkpoint
from support.waiting import until_true

INFER = "/v2/models/{}/infer"
IMAGE = {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [0.0] * 64}

ADDER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name in ("A", "B"):
            config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "SUM", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        A, B = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("A", "B"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", A + B)])
"""


@pytest.mark.parametrize(
    ("source", "name"), [("digits_onnx/1/model.onnx", "mnist-8.onnx"), ("digits_export/1/model.pt2", "exported.PT2")]
)
def test_a_file_is_served_under_its_own_name(tmp_path: Path, model_repository: Path, source: str, name: str) -> None:
    file = Path(shutil.copy(model_repository / source, tmp_path / name))
    (tmp_path / "broken.onnx").write_text("what lies beside the file is not a part of it")
    with running_server(file) as server, httpx.Client(base_url=f"http://{server.http_url}") as client:
        answer = client.post(INFER.format(file.stem), json={"inputs": [IMAGE]})
        assert answer.status_code == 200, answer.text
        config = client.get(f"/v2/models/{file.stem}/config").json()
        assert config["default_model_filename"] == name


def test_a_python_model_is_served_and_replaced_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "adder.py"
    file.write_text(ADDER)
    numbers = [{"name": name, "datatype": "FP32", "shape": [1], "data": [3.0]} for name in ("A", "B")]
    options = {"model_name": "sums", "model_control_mode": "poll", "repository_poll_secs": 1}
    with running_server(file, **options) as server, httpx.Client(base_url=f"http://{server.http_url}") as client:

        def result() -> float:
            answer = client.post(INFER.format("sums"), json={"inputs": numbers})
            assert answer.status_code == 200, answer.text
            found: float = answer.json()["outputs"][0]["data"][0]
            return found

        assert result() == 6.0
        file.write_text(ADDER.replace("A + B", "A * B"))
        until_true(lambda: result() == 9.0, "the model is replaced")


def test_a_gguf_file_is_a_language_model(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "Tiny-Q8.gguf")
    with running_server(file) as server:
        document = {"model": "Tiny-Q8", "prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"http://{server.http_url}/v1/completions", json=document, timeout=30)
    assert answer.status_code == 200, answer.text

"""Models that OpenVINO itself has written, and one of ONNX, by the openvino backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino
import pytest
from openvino import opset13
from support.clients import ProtocolClient
from support.contexts import context_of, instance_of, loaded
from support.onnx_models import onnx_model, value
from support.serving import RunningServer, running_server

from modelserver.backend import BackendContext, ConfigError, InvalidArgumentError, ModelConfig
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_file, backend_for_model_files

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("openvino")
    x = opset13.parameter([-1, 3], np.float32, name="x")
    x.output(0).set_names({"x"})
    doubled, counted = opset13.multiply(x, np.float32(2)), opset13.reduce_sum(x, np.array([0, 1]))
    doubled.output(0).set_names({"doubled:0", "doubled"})
    counted.output(0).set_names({"sum"})
    batched = openvino.Model([opset13.result(doubled)], [x], "batched")
    openvino.save_model(batched, root / "batched" / "1" / "model.xml", compress_to_fp16=False)
    summed = openvino.Model([opset13.result(counted)], [x], "summed")
    openvino.save_model(summed, root / "summed" / "1" / "model.xml", compress_to_fp16=False)
    (root / "copied" / "1").mkdir(parents=True)
    (root / "copied" / "config.pbtxt").write_text('backend: "openvino"\ndefault_model_filename: "copy.onnx"')
    copied = onnx_model([value("a", ["n", 3])], [value("b", ["n", 3])])
    (root / "copied" / "1" / "copy.onnx").write_bytes(copied.SerializeToString())
    return root


@pytest.fixture(scope="session")
def serving(models: Path) -> Iterator[RunningServer]:
    with running_server(models) as server:
        yield server


def test_models_are_served(protocol: type[ProtocolClient], serving: RunningServer) -> None:
    with protocol(serving) as client:
        assert client.infer("batched", {"x": ROWS})["doubled"].tolist() == (ROWS * 2).tolist()
        assert client.infer("batched", {"x": -ROWS[:1]})["doubled"].tolist() == (ROWS[:1] * -2).tolist()
        assert client.infer("summed", {"x": ROWS})["sum"].tolist() == [15.0]
        assert client.infer("copied", {"a": ROWS})["b"].tolist() == ROWS.tolist()
        assert client.model_config("batched")["max_batch_size"] == 4


def test_files_are_recognised(models: Path, tmp_path: Path) -> None:
    assert backend_for_model_files(models / "batched" / "1") == "openvino"
    assert backend_for_model_file(models / "batched" / "1" / "model.xml") == "openvino"
    for name in ("saved_model.pb", "model.tflite", "model.pdmodel"):
        (tmp_path / name).touch()
        assert backend_for_model_files(tmp_path) == "openvino"
        (tmp_path / name).unlink()
    (tmp_path / "sheet.xml").write_text("<?xml version='1.0'?><PMML/>")
    with pytest.raises(InvalidArgumentError, match="cannot be served"):
        backend_for_model_file(tmp_path / "sheet.xml")


@pytest.mark.parametrize("file", ["model.xml", "model.tflite"])
def test_a_broken_file_is_refused_with_the_reason(models: Path, tmp_path: Path, file: str) -> None:
    content = (models / "batched" / "1" / "model.xml").read_text()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / file).write_text(content[: len(content) // 2])
    with pytest.raises(InvalidArgumentError, match=rf"OpenVINO cannot read .*{file}: ."):
        loaded(find_backend("openvino"), context_of(tmp_path))


def test_properties_are_openvinos_own(models: Path) -> None:
    def context(value: str) -> BackendContext:
        config = ModelConfig(parameters={"INFERENCE_NUM_THREADS": value})
        return context_of(models / "batched", config=config)

    assert instance_of("openvino", context("2")).run({"x": ROWS})["doubled"].tolist() == (ROWS * 2).tolist()
    with pytest.raises(ConfigError, match=r"OpenVINO cannot compile it with .*'INFERENCE_NUM_THREADS': 'many'"):
        instance_of("openvino", context("many"))

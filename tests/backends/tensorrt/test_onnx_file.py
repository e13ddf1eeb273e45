"""ONNX files read by hand: compared with the onnx package, and hard to break."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from modelserver_backends.tensorrt.onnx_file import read_onnx
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import onnx_model, value, write_model

from modelserver.backend import Datatype, InvalidArgumentError, NotFoundError


def path_of(directory: Path) -> Path:
    return directory / "1" / "model.onnx"


def test_inputs_and_outputs_are_those_of_the_file(tmp_path: Path) -> None:
    model = onnx_model(
        [value("a", ["batch", 3, None]), value("b", [], TensorProto.INT64), value("c", [-1], TensorProto.STRING)],
        [value("x", ["batch", 3, None]), value("y", [], TensorProto.INT64), value("z", [-1], TensorProto.STRING)],
    )
    found = read_onnx(path_of(write_model(tmp_path / "m", model)))
    assert [(tensor.name, tensor.datatype, tensor.dims) for tensor in found.inputs] == [
        ("a", Datatype.FP32, ("batch", 3, None)),
        ("b", Datatype.INT64, ()),
        ("c", Datatype.BYTES, (None,)),
    ]
    assert [tensor.name for tensor in found.outputs] == ["x", "y", "z"]
    assert found.inputs[0].shape == (-1, 3, -1)
    assert found.opset == 17


def test_every_example_model_reads_as_the_onnx_package_reads_it(model_repository: Path) -> None:
    files = sorted(model_repository.rglob("*.onnx"))
    assert files
    for file in files:
        graph = onnx.load(file).graph
        found = read_onnx(file)
        for ours, theirs in ((found.inputs, graph.input), (found.outputs, graph.output)):
            assert [tensor.name for tensor in ours] == [tensor.name for tensor in theirs]
            for tensor, info in zip(ours, theirs, strict=True):
                dims = [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
                assert list(tensor.dims or ()) == dims


def test_weights_that_are_listed_as_inputs_are_none(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones(3, np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    model = onnx_model([value("x", [3]), value("w", [3])], [value("y", [3])], [node])
    model.graph.initializer.append(weight)
    found = read_onnx(path_of(write_model(tmp_path / "m", model)))
    assert [tensor.name for tensor in found.inputs] == ["x"]


def external_model(tmp_path: Path, location: str) -> Path:
    model = onnx_model([value("x", [3])], [value("y", [3])], [helper.make_node("Add", ["x", "w"], ["y"])])
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    model.graph.initializer.append(weight)
    return path_of(write_model(tmp_path / "m", model))


def test_weights_beside_the_file_are_found(tmp_path: Path) -> None:
    path = external_model(tmp_path, "weights/w.bin")
    (path.parent / "weights").mkdir()
    (path.parent / "weights" / "w.bin").write_bytes(bytes(12))
    assert [file.name for file in read_onnx(path).external_files] == ["w.bin"]


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link/secret", "a/../../secret"])
def test_weights_from_elsewhere_are_refused(tmp_path: Path, location: str) -> None:
    path = external_model(tmp_path, location)
    (path.parent.parent / "secret").write_bytes(bytes(12))
    (path.parent / "link").symlink_to(path.parent.parent)
    with pytest.raises(InvalidArgumentError, match="outside of the model's directory"):
        read_onnx(path)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected its weights in the file 'w\.bin' beside it"):
        read_onnx(external_model(tmp_path, "w.bin"))


def test_weights_within_a_branch_count_too(tmp_path: Path) -> None:
    inner = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    inner.external_data.add(key="location", value="../secret")
    branch = helper.make_graph([], "branch", [], [value("w", [3])], [inner])
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    path = path_of(write_model(tmp_path / "m", onnx_model([value("x", [1])], [value("y", [3])], [node])))
    with pytest.raises(InvalidArgumentError, match="outside of the model's directory"):
        read_onnx(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected an ONNX model"),
        (b"\xff" * 64, "expected an ONNX model"),
        (b"<html></html>", "expected an ONNX model"),
        (b"\x08\x08", "at least one input"),
    ],
)
def test_what_is_no_model_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=said):
        read_onnx(path)
    with pytest.raises(NotFoundError):
        read_onnx(tmp_path / "other.onnx")


def test_damaged_files_are_errors_and_nothing_else(tmp_path: Path, model_repository: Path) -> None:
    whole = (model_repository / "digits_onnx/1/model.onnx").read_bytes()
    # The weights are most of the file, and nothing in them can be wrong: what is around them is what is changed.
    head, tail = whole[:400], whole[-700:]
    generator = random.Random(6)
    path = tmp_path / "model.onnx"
    for _ in range(300):
        changed = bytearray(head + tail)
        for _ in range(generator.randint(1, 8)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(changed[: generator.randint(1, len(changed))])
        with contextlib.suppress(InvalidArgumentError):
            read_onnx(path)

"""Weights outside of the ONNX file: found wherever they hang, and only in the version directory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from modelserver_backends.onnxruntime.external_data import check_external_data, external_locations
from onnx import ModelProto, TensorProto, helper
from support.contexts import context_of, instance_of
from support.onnx_models import onnx_model, value

from modelserver.backend import InvalidArgumentError


def outside(location: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, text in (("offset", "0"), ("location", location), ("length", "4")):
        tensor.external_data.add(key=key, value=text)
    return tensor


def model_with(tensor: TensorProto, where: str) -> ModelProto:
    """A model that holds the tensor as a weight, or deeper."""
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    model = onnx_model([value("x", [1])], [value("y", [1])], nodes=[add])
    match where:
        case "weight":
            model.graph.initializer.append(tensor)
        case "node":
            model.graph.node.insert(0, constant)
        case "branch":
            branch = helper.make_graph([constant], "branch", [], [value("w", [1])])
            model.graph.node.insert(0, helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch))
        case "function":
            model.functions.append(
                helper.make_function("own", "f", [], ["w"], [constant], [helper.make_opsetid("", 17)])
            )
    return model


def saved(directory: Path, model: ModelProto) -> Path:
    path = directory / "m" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("where", ["weight", "node", "branch", "function"])
@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "link.bin"])
def test_a_path_that_leads_out_is_refused_before_anybody_follows_it(tmp_path: Path, where: str, location: str) -> None:
    path = saved(tmp_path, model_with(outside(location), where))
    (tmp_path / "m" / "secret.bin").write_bytes(b"\0" * 4)
    (path.parent / "link.bin").symlink_to(tmp_path / "m" / "secret.bin")
    assert external_locations(path.read_bytes()) == {location}
    with pytest.raises(InvalidArgumentError, match=r"keeps weights in '.*', outside of .*/m/1; put the file beside"):
        instance_of("onnxruntime", context_of(tmp_path / "m"))


@pytest.mark.parametrize(("location", "reason"), [("gone.bin", "there is no file"), ("a\0b", "is not a path")])
def test_what_is_not_there_is_named(tmp_path: Path, location: str, reason: str) -> None:
    path = saved(tmp_path, model_with(outside(location), "weight"))
    with pytest.raises(InvalidArgumentError, match=reason):
        check_external_data(path, path.parent)


def test_a_file_beside_the_model_is_fine(tmp_path: Path) -> None:
    path = saved(tmp_path, model_with(outside("w.bin"), "weight"))
    (path.parent / "w.bin").write_bytes(b"\0\0\x80\x3f")  # 1.0
    instance = instance_of("onnxruntime", context_of(tmp_path / "m"))
    assert instance.run({"x": __import__("numpy").ones(1, "float32")})["y"].tolist() == [2]


def test_any_bytes_are_read_to_an_end() -> None:
    content = model_with(outside("w.bin"), "branch").SerializeToString()
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content[: rng.randrange(len(content))])
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        external_locations(bytes(damaged) + rng.randbytes(rng.randrange(20)))

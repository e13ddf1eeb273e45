"""Tiny ONNX files with exactly the inputs and outputs that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

Dims = Sequence[int | str | None]


def value(name: str, dims: Dims | None, onnx_type: int = TensorProto.FLOAT) -> ValueInfoProto:
    """An input or output; a str is a symbolic dimension, None any shape."""
    return helper.make_tensor_value_info(name, onnx_type, None if dims is None else list(dims))


def onnx_model(
    inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto], nodes: Sequence[NodeProto] = ()
) -> ModelProto:
    """A model of `nodes`, or of one Identity per input and output in order."""
    copies = [
        helper.make_node("Identity", [source.name], [target.name])
        for source, target in zip(inputs, outputs, strict=False)
    ]
    graph = helper.make_graph(list(nodes) or copies, "test", list(inputs), list(outputs))
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def write_model(model_directory: Path, model: ModelProto, *, version: int = 1) -> Path:
    """`model` as the ONNX file of a version; gives back the model directory."""
    path = model_directory / str(version) / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return model_directory


def identity_model(model_directory: Path, dims: Dims, onnx_type: int = TensorProto.FLOAT) -> Path:
    """A model directory whose ONNX file copies input `x` to output `y`."""
    return write_model(model_directory, onnx_model([value("x", dims, onnx_type)], [value("y", dims, onnx_type)]))

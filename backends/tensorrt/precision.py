"""An ONNX file in another precision, whose inputs and outputs stay as they are.

TensorRT 11 and TensorRT for RTX take precision from the file alone. onnxruntime's converter decides which nodes can
compute in half precision; for bfloat16 its FP16 becomes BF16, with weights from the original, because FP16 has cut
large ones off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Array, InvalidArgumentError, ServerError, UnsupportedError

# Of operators, `Cast` and whatever makes tensors name a datatype in one of these.
_TYPE_ATTRIBUTES = ("to", "dtype")
# BF16 came to most operators with it.
_BFLOAT16_OPSET = 13


def in_precision(source: Path, scratch: Path, precision: str) -> Path:
    """The file that TensorRT gets for `source`: itself ("keep"), or a converted one in the directory `scratch`."""
    return source if precision == "keep" else convert(source, scratch / "model.onnx", precision)


def convert(source: Path, target: Path, precision: str) -> Path:
    """Write `source` in "fp16" or "bf16"; gives back `target`.

    Raises UnsupportedError without the converter (packages onnx and onnxruntime), InvalidArgumentError where it fails.
    """
    change = {"fp16": _to_float16, "bf16": _to_bfloat16}[precision]
    return _changed(source, target, change, f"converted to {precision}")


def round_weights(source: Path, target: Path) -> Path:
    """Write `source` with FP32 weights that BF16 can hold, for runtimes without BF16. Raises as `convert`."""
    return _changed(source, target, _round_weights, "rounded to bf16")


def _changed(source: Path, target: Path, change: Callable[[Any], Any], what: str) -> Path:
    onnx = _library("onnx")
    try:
        onnx.save(change(onnx.load(str(source))), str(target))
    except ServerError as error:
        raise type(error)(f"{source}: {error.message}") from error
    except Exception as error:  # the edge of a request: the converter raises whatever it likes
        raise InvalidArgumentError(f"{source}: cannot be {what}: {type(error).__name__}: {error}") from error
    return target


def _library(name: str) -> Any:
    try:
        if name == "onnx":
            import onnx

            return onnx
        from onnxruntime.transformers import float16

        return float16
    except ImportError as error:
        raise UnsupportedError(
            f"precision fp16 and bf16 need the Python packages onnx and onnxruntime ({error}): "
            "pip install onnx onnxruntime"
        ) from error


def _to_float16(model: Any) -> Any:
    return _library("float16").convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=False)


def _to_bfloat16(model: Any) -> Any:
    types = _library("onnx").TensorProto
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _BFLOAT16_OPSET:
        raise InvalidArgumentError(
            f"precision bf16: expected opset {_BFLOAT16_OPSET} or later, got {opset}: export it again"
        )
    weights = dict(_weights(model.graph))
    if types.FLOAT16 in _datatypes(model.graph):
        raise InvalidArgumentError("precision bf16: expected a model in FP32, got FP16 in it; serve it as it is (keep)")
    originals = {name: _values(tensor) for name, tensor in weights.items() if tensor.data_type == types.FLOAT}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that FP16 cuts off: they come from the original
        converted = _to_float16(model)
    for name, tensor in _weights(converted.graph):
        if tensor.data_type == types.FLOAT16:
            _store(tensor, _rounded(originals[name]))
    for number, graph in enumerate(_graphs(converted.graph)):
        # The inputs and outputs of the whole model stay in FP32.
        outside = [*graph.input, *graph.output] if number else []
        for value in [*graph.value_info, *outside]:
            if value.type.tensor_type.elem_type == types.FLOAT16:
                value.type.tensor_type.elem_type = types.BFLOAT16
        for attribute in _type_attributes(graph):
            if attribute.i == types.FLOAT16:
                attribute.i = types.BFLOAT16
    return converted


def _datatypes(graph: Any) -> set[int]:
    """Every datatype that the graph names."""
    found = {tensor.data_type for _, tensor in _weights(graph)}
    for part in _graphs(graph):
        found |= {value.type.tensor_type.elem_type for value in [*part.input, *part.output, *part.value_info]}
        found |= {attribute.i for attribute in _type_attributes(part)}
    return found


def _type_attributes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield from (attribute for attribute in node.attribute if attribute.name in _TYPE_ATTRIBUTES)


def _round_weights(model: Any) -> Any:
    helper = _library("onnx").numpy_helper
    for _, tensor in _weights(model.graph):
        if tensor.data_type == _library("onnx").TensorProto.FLOAT:
            values = (_rounded(_values(tensor)).astype(np.uint32) << 16).view(np.float32)
            tensor.CopyFrom(helper.from_array(values, tensor.name))
    return model


def _graphs(graph: Any) -> Iterator[Any]:
    """The graph, and those inside of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else list(attribute.graphs):
                yield from _graphs(inner)


def _weights(graph: Any) -> Iterator[tuple[str, Any]]:
    """Initialisers by their names, constants by those of the outputs of their nodes."""
    for part in _graphs(graph):
        for tensor in part.initializer:
            yield tensor.name, tensor
        for node in part.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield node.output[0], attribute.t


def _values(tensor: Any) -> Array:
    array: Array = _library("onnx").numpy_helper.to_array(tensor)
    return array


def _rounded(values: Array) -> Array:
    """The bits of BF16, rounded to the nearest, to the even one of two."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _store(tensor: Any, bits: Array) -> None:
    name, dims = tensor.name, list(bits.shape)
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.raw_data = name, _library("onnx").TensorProto.BFLOAT16, bits.tobytes()
    tensor.dims.extend(dims)

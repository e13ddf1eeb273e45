"""ONNX files in half precision: what changes, and how far ONNX Runtime then is from the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from modelserver_backends.tensorrt.build_options import BuildOptions
from modelserver_backends.tensorrt.precision import convert, round_weights
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import onnx_model, value

from modelserver.backend import InvalidArgumentError

# The last two are beyond FP16, on either side.
WEIGHTS = np.array([[1.0, 1.0 + 2**-8, -3.14159, 70000.0, 1e-30]], np.float32)


def saved(directory: Path, *, opset: int = 17, datatype: type[np.generic] = np.float32) -> Path:
    """y = relu(cast(int, float)) * w + a constant, with an `If` around a weight of its own."""
    then_branch, else_branch = (
        helper.make_graph(
            [], name, [], [value(name, [5])], [numpy_helper.from_array(np.full(5, 0.1, np.float32), name)]
        )
        for name in ("this", "that")
    )
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32([80000.0]), "c")),
        helper.make_node("Mul", ["f", "w"], ["m"]),
        helper.make_node("Add", ["m", "c"], ["s"]),
        helper.make_node("If", ["flag"], ["branched"], then_branch=then_branch, else_branch=else_branch),
        helper.make_node("Add", ["s", "branched"], ["y"]),
    ]
    inputs = [value("i", ["n", 5], TensorProto.INT64), value("flag", [], TensorProto.BOOL)]
    model = onnx_model(inputs, [value("y", ["n", 5])], nodes)
    model.opset_import[0].version = opset
    model.graph.initializer.append(
        numpy_helper.from_array(
            np.clip(WEIGHTS, -60000, 60000).astype(datatype) if datatype is np.float16 else WEIGHTS, "w"
        )
    )
    path = directory / "model.onnx"
    onnx.save(model, str(path))
    return path


def rounded(values: np.ndarray) -> np.ndarray:
    """To 8 bits of mantissa, by arithmetic instead of by bits."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(np.float32)


def bfloat16(tensor: onnx.TensorProto) -> np.ndarray:
    bits = np.frombuffer(tensor.raw_data, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(tuple(tensor.dims))


def test_bf16_weights_come_from_the_original(tmp_path: Path) -> None:
    model = onnx.load(str(convert(saved(tmp_path), tmp_path / "half.onnx", "bf16")))
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "w")
    assert weight.data_type == TensorProto.BFLOAT16
    assert np.array_equal(bfloat16(weight), rounded(WEIGHTS))
    (constant,) = (node.attribute[0].t for node in model.graph.node if node.op_type == "Constant")
    assert np.array_equal(bfloat16(constant), rounded(np.float32([80000.0])))
    text = str(model)
    assert "elem_type: 10\n" not in text, "there is no FP16 left"
    targets = {node.attribute[0].i for node in model.graph.node if node.op_type == "Cast"}
    assert targets <= {TensorProto.FLOAT, TensorProto.BFLOAT16}
    outside = [*model.graph.input, *model.graph.output]
    assert [tensor.type.tensor_type.elem_type for tensor in outside] == [
        TensorProto.INT64,
        TensorProto.BOOL,
        TensorProto.FLOAT,
    ]
    onnx.checker.check_model(model)


def test_rounded_weights_run_in_fp32(tmp_path: Path) -> None:
    session = onnxruntime.InferenceSession(str(round_weights(saved(tmp_path), tmp_path / "rounded.onnx")))
    given = np.array([[1, 2, 3, 0, 4]], np.int64)
    (y,) = session.run(None, {"i": given, "flag": np.array(True)})
    expected = given * rounded(WEIGHTS) + rounded(np.float32([80000.0])) + rounded(np.float32([0.1]))
    assert np.allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"opset": 12}, "expected opset 13 or later, got 12"), ({"datatype": np.float16}, "got FP16 in it")],
)
def test_what_cannot_become_bf16_has_a_reason(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    path = saved(tmp_path, **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=said) as raised:
        convert(path, tmp_path / "half.onnx", "bf16")
    assert str(path) in raised.value.message
    assert not (tmp_path / "half.onnx").exists()


def test_eight_bits_come_from_the_file() -> None:
    with pytest.raises(InvalidArgumentError, match=r"got 'int8': .* modelserver quantize --for-tensorrt"):
        BuildOptions(precision="int8")

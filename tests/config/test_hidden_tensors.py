"""What a model's file has and its clients do not see: how a config is completed and checked with it."""

from __future__ import annotations

import pytest

from modelserver.config.completion import FileSignature, FileTensor, check, complete
from modelserver.config.hidden_tensors import hidden_inputs, hidden_outputs, model_inputs, model_outputs
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.schema import ModelConfig
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError

FLOAT, INT = Datatype.FP32, Datatype.INT32
SEQUENCE = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  state { input_name: "S_IN" output_name: "S_OUT" data_type: TYPE_INT32 dims: [ -1, 2 ] }
  state { input_name: "T_IN" output_name: "T_OUT" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""
BATCH = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_INT32 source_input: "IN" }
batch_output { target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" }
"""


def parsed(text: str) -> ModelConfig:
    return parse_pbtxt(f"max_batch_size: 4 {text}").config


def test_controls_states_and_batch_inputs_are_tensors_of_the_model() -> None:
    config = parsed(SEQUENCE.replace("T_OUT", "OUT") + 'input { name: "IN" } output { name: "OUT" }')
    hidden = {tensor.name: (tensor.data_type, tensor.dims) for tensor in hidden_inputs(config)}
    assert hidden == {
        "START": (FLOAT, (1,)),
        "ID": (Datatype.UINT64, (1,)),
        "S_IN": (INT, (-1, 2)),
        "T_IN": (FLOAT, (1,)),
    }
    assert [tensor.name for tensor in model_inputs(config)] == ["IN", *hidden]
    assert [tensor.name for tensor in hidden_outputs(config)] == ["S_OUT"], "an output of the config is not hidden"
    assert [tensor.name for tensor in model_outputs(config)] == ["OUT", "S_OUT"]
    assert [tensor.name for tensor in hidden_inputs(parsed(BATCH))] == ["COUNT"]


SIGNATURE = FileSignature(
    (
        FileTensor("IN", FLOAT, (-1, 3)),
        FileTensor("START", FLOAT, (-1, 1)),
        FileTensor("ID", Datatype.UINT64, (-1, 1)),
        FileTensor("S_IN", INT, (-1, -1, 2)),
        FileTensor("T_IN", FLOAT, (-1, 1)),
    ),
    (FileTensor("OUT", FLOAT, (-1, 1)), FileTensor("S_OUT", INT, (-1, -1, 2)), FileTensor("T_OUT", FLOAT, (-1, 1))),
)


def test_completion_leaves_hidden_tensors_to_the_server() -> None:
    config = complete(parsed(SEQUENCE), SIGNATURE, default_max_batch_size=4, source="config.pbtxt")
    assert [tensor.name for tensor in config.input] == ["IN"]
    assert [tensor.name for tensor in config.output] == ["OUT"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SEQUENCE.replace('"S_IN"', '"STATE"'), "sequence_batching: expected 'STATE' to be one of the file's inputs"),
        (SEQUENCE.replace("TYPE_UINT64", "TYPE_INT64"), "sequence_batching: expected TYPE_UINT64 for 'ID'"),
        (SEQUENCE.replace('"S_OUT"', '"GONE"'), "sequence_batching: expected 'GONE' to be one of the file's outputs"),
    ],
)
def test_a_file_without_a_hidden_tensor_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(parsed(text), SIGNATURE, source="config.pbtxt")


def test_ragged_tensors_are_flat_in_the_file() -> None:
    flat = FileSignature(
        (FileTensor("IN", FLOAT, (-1,)), FileTensor("COUNT", INT, (-1,))), (FileTensor("OUT", FLOAT, (-1,)),)
    )
    check(parsed(BATCH), flat, source="config.pbtxt")
    square = FileSignature((FileTensor("IN", FLOAT, (-1, -1)), flat.inputs[1]), flat.outputs)
    with pytest.raises(ConfigError, match=r"allow_ragged_batch: expected \[-1\] as the file's shape of 'IN'"):
        check(parsed(BATCH), square, source="config.pbtxt")

"""Data made up, or read from files in perf_analyzer's forms."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelserver.bench.input_data import DataOptions, Step, read_data
from modelserver.bench.interface import Interface
from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.core.tensor import decode_bytes_elements
from modelserver.errors import InvalidArgumentError


def interface(*inputs: TensorSpec, max_batch_size: int = 0, outputs: tuple[TensorSpec, ...] = ()) -> Interface:
    return Interface("m", "1", inputs, outputs, max_batch_size=max_batch_size)


FLOATS = TensorSpec("F", Datatype.FP32, (2, 2))
OPEN = TensorSpec("V", Datatype.INT32, (-1,))
TEXT = TensorSpec("T", Datatype.BYTES, (2,))


def write(tmp_path: Path, document: Any, name: str = "data.json") -> DataOptions:
    path = tmp_path / name
    path.write_text(json.dumps(document))
    return DataOptions(sources=(str(path),))


def values(step: Step, name: str, dtype: str = "int32") -> list[Any]:
    (tensor,) = [tensor for tensor in step.inputs if tensor.name == name]
    return np.frombuffer(tensor.raw, dtype).reshape(tensor.shape).tolist()


@pytest.mark.parametrize("datatype", list(Datatype))
@pytest.mark.parametrize("source", ["random", "zero"])
def test_made_up_tensors_have_the_right_size(datatype: Datatype, source: str) -> None:
    spec = TensorSpec("X", datatype, (3, 2))
    ((step,),) = read_data(interface(spec), DataOptions(sources=(source,), string_length=10))
    (tensor,) = step.inputs
    assert tensor.shape == (3, 2)
    assert len(tensor.raw) == 6 * (datatype.itemsize or (14 if source == "random" else 4))


def test_a_seed_repeats_the_data_and_text_may_be_given() -> None:
    options = DataOptions(seed=3)
    assert read_data(interface(FLOATS), options) == read_data(interface(FLOATS), options)
    assert read_data(interface(FLOATS), options) != read_data(interface(FLOATS), DataOptions(seed=4))
    ((step,),) = read_data(interface(TEXT), DataOptions(string_data="hey"))
    assert decode_bytes_elements("T", (2,), step.inputs[0].raw).tolist() == [b"hey", b"hey"]


def test_a_variable_shape_must_be_said() -> None:
    with pytest.raises(InvalidArgumentError, match=r"say its shape with --shape V:16"):
        read_data(interface(OPEN), DataOptions())
    ((step,),) = read_data(interface(OPEN), DataOptions(shapes={"V": (5,)}))
    assert step.inputs[0].shape == (5,)
    with pytest.raises(InvalidArgumentError, match=r"does not fit the model's \[2, 2\]"):
        read_data(interface(FLOATS), DataOptions(shapes={"F": (2, 3)}))
    with pytest.raises(InvalidArgumentError, match="did you mean 'FLOAT_IN'"):
        read_data(interface(TensorSpec("FLOAT_IN", Datatype.FP32, (1,))), DataOptions(shapes={"FLOATIN": (1,)}))


def test_batches_need_a_model_that_takes_them() -> None:
    ((step,),) = read_data(interface(FLOATS, max_batch_size=8), DataOptions(batch_size=3))
    assert step.inputs[0].shape == (3, 2, 2)
    with pytest.raises(InvalidArgumentError, match="use -b 1"):
        read_data(interface(FLOATS), DataOptions(batch_size=3))
    with pytest.raises(InvalidArgumentError, match="above the max_batch_size 8"):
        read_data(interface(FLOATS, max_batch_size=8), DataOptions(batch_size=9))


def test_lists_base64_and_shapes_of_a_file(tmp_path: Path) -> None:
    raw = base64.b64encode(np.array([5, 6], np.int32).tobytes()).decode()
    options = write(
        tmp_path,
        {
            "data": [
                {"V": {"content": [1, 2, 3], "shape": [3]}},
                {"V": {"content": {"b64": raw}, "shape": [2]}},
                {"V": {"content": [[7], [8]], "shape": [2]}},
            ]
        },
    )
    (stream,) = read_data(interface(OPEN), options)
    assert [values(step, "V") for step in stream] == [[1, 2, 3], [5, 6], [7, 8]]


def test_strings_and_the_shape_of_the_command_line(tmp_path: Path) -> None:
    options = write(tmp_path, {"data": [{"T": ["a", "bc"]}]})
    ((step,),) = read_data(interface(TEXT), options)
    assert decode_bytes_elements("T", (2,), step.inputs[0].raw).tolist() == [b"a", b"bc"]
    given = DataOptions(sources=write(tmp_path, {"data": [{"V": [1, 2]}]}).sources, shapes={"V": (2,)})
    ((step,),) = read_data(interface(OPEN), given)
    assert values(step, "V") == [1, 2]


def test_streams_and_several_files(tmp_path: Path) -> None:
    first = write(
        tmp_path, {"data": [[{"V": {"content": [1], "shape": [1]}}], [{"V": {"content": [2], "shape": [1]}}]]}
    )
    second = write(tmp_path, {"data": [{"V": {"content": [3], "shape": [1]}}]}, "more.json")
    streams = read_data(interface(OPEN), DataOptions(sources=first.sources + second.sources))
    assert [[values(step, "V") for step in stream] for stream in streams] == [[[1]], [[2]], [[3]]]


def test_rows_of_a_batch_follow_each_other_and_begin_again(tmp_path: Path) -> None:
    spec = TensorSpec("V", Datatype.INT32, (1,))
    sources = write(tmp_path, {"data": [{"V": [number]} for number in (1, 2, 3)]}).sources
    (stream,) = read_data(interface(spec, max_batch_size=4), DataOptions(sources=sources, batch_size=2))
    assert [values(step, "V") for step in stream] == [[[1], [2]], [[3], [1]]]


def test_rows_of_a_batch_expect_the_same_outputs(tmp_path: Path) -> None:
    spec = TensorSpec("V", Datatype.INT32, (1,))
    document = {"data": [{"V": [1]}, {"V": [2]}], "validation_data": [{"OUT": [1]}, {}]}
    given = interface(spec, max_batch_size=4, outputs=(TensorSpec("OUT", Datatype.INT32, (1,)),))
    options = DataOptions(sources=write(tmp_path, document).sources, batch_size=2)
    with pytest.raises(InvalidArgumentError, match="the same outputs in 'validation_data'"):
        read_data(given, options)


def test_expected_outputs(tmp_path: Path) -> None:
    outputs = (TensorSpec("OUT", Datatype.INT32, (-1,)),)
    document = {"data": [{"V": {"content": [1], "shape": [1]}}], "validation_data": [{"OUT": [4, 5]}]}
    ((step,),) = read_data(interface(OPEN, outputs=outputs), write(tmp_path, document))
    assert step.expected == {"OUT": np.array([4, 5], np.int32).tobytes()}


def test_a_directory_has_a_file_for_each_input(tmp_path: Path) -> None:
    (tmp_path / "F").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "T").write_text("one\ntwo\n")
    ((step,),) = read_data(interface(FLOATS, TEXT), DataOptions(sources=(str(tmp_path),)))
    assert values(step, "F", "float32") == [[0, 1], [2, 3]]
    (tmp_path / "T").write_bytes(b"\xff\n\x0c\r\n")
    ((step,),) = read_data(interface(FLOATS, TEXT), DataOptions(sources=(str(tmp_path),)))
    assert decode_bytes_elements("T", (2,), step.inputs[1].raw).tolist() == [b"\xff", b"\x0c"]
    (tmp_path / "T").write_text("one\n")
    with pytest.raises(InvalidArgumentError, match=r"'.*T' has 1 lines, expected 2 for shape \[2\] of BYTES"):
        read_data(interface(FLOATS, TEXT), DataOptions(sources=(str(tmp_path),)))
    (tmp_path / "T").unlink()
    with pytest.raises(InvalidArgumentError, match=r"no file '.*T' for input 'T'"):
        read_data(interface(FLOATS, TEXT), DataOptions(sources=(str(tmp_path),)))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected"),
        ({"data": []}, "expected"),
        ({"data": [{"F": [1, 2, 3]}]}, "entry 0, input 'F'.*Expected 16, got 12"),
        ({"data": [{"F": ["x"] * 4}]}, "numbers"),
        ({"data": [{"G": [1]}]}, "has no input 'G'"),
        ({"data": [{}]}, "input 'F' is missing"),
        ({"data": [{"F": {"b64": "?"}}]}, "not base64"),
        ({"data": [{"F": {"shape": [1]}}]}, "'content'"),
        ({"data": [{"F": {"content": [1], "shape": [-1]}}]}, "a shape such as"),
        ({"data": [3]}, "an object of inputs"),
        ({"data": [{"F": [1, 2, 3, 4]}], "validation_data": []}, "as many entries"),
        ({"data": [{"F": [1, 2, 3, 4]}], "validation_data": [{"NO": [1]}]}, "no output 'NO'"),
        ({"data": [{"F": [1, 2, 3, 4]}], "validation_data": [3]}, "an object of outputs in 'validation_data', got 3"),
        ({"data": [[{"F": [1, 2, 3, 4]}], {}]}, "stream 1: expected a list of requests"),
        ({"data": [[]]}, "stream 0: expected a list of requests"),
        ({"data": [[{"F": [1, 2, 3, 4]}]], "validation_data": [3]}, "stream 0: 'validation_data' must have as many"),
        ({"data": [{"F": [1, 2, 3]}]}, r"entry 0, input 'F': .*Expected 16, got 12"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_data(interface(FLOATS), write(tmp_path, document))


def test_a_file_that_is_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="random, zero, or a path"):
        read_data(interface(FLOATS), DataOptions(sources=(str(tmp_path / "no.json"),)))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="is not JSON"):
        read_data(interface(FLOATS), DataOptions(sources=(str(tmp_path / "bad.json"),)))

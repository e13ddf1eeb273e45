"""ONNX files: completion of configs, conflicts, and files that cannot be loaded."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save_model
from support.contexts import context_of, instance_of, loaded
from support.onnx_models import identity_model, onnx_model, value, write_model

from modelserver.backend import ConfigError, Datatype, InvalidArgumentError, NotFoundError, Placement, UnsupportedError
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelDynamicBatching, ModelTensorReshape

onnx_backend = pytest.fixture(lambda: find_backend("onnxruntime"))


def described(specs: object) -> list[tuple[str, Datatype | None, tuple[int, ...]]]:
    return [(spec.name, spec.data_type, spec.dims) for spec in specs]  # type: ignore[attr-defined]


def test_a_config_is_not_needed(onnx_backend, model_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "1").symlink_to(model_repository / "digits_onnx" / "1")
    config = onnx_backend.complete_config(context_of(tmp_path / "m"))
    assert described(config.input) == [("image", Datatype.FP32, (8, 8))]
    assert described(config.output) == [("probabilities", Datatype.FP32, (10,)), ("digit", Datatype.INT64, (1,))]
    assert config.max_batch_size == 4
    assert config.dynamic_batching == ModelDynamicBatching()


def test_the_written_config_of_the_example_is_what_the_file_says(onnx_backend, model_repository: Path) -> None:
    context = context_of(model_repository / "digits_onnx")
    assert onnx_backend.complete_config(context) == context.config


@pytest.mark.parametrize(("option", "size", "batches"), [("16", 16, True), ("1", 1, False), ("0", 0, False)])
def test_the_default_batch_size_is_an_option(onnx_backend, tmp_path: Path, option: str, size: int, batches) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    config = onnx_backend.complete_config(context_of(directory, options={"default-max-batch-size": option}))
    assert config.max_batch_size == size
    assert (config.dynamic_batching is not None) is batches
    assert config.input[0].dims == ((3,) if size else (-1, 3))


def test_a_default_batch_size_that_is_no_number_is_named(onnx_backend, tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    with pytest.raises(ConfigError, match="default-max-batch-size: expected a whole number of 0 or more, got 'many'"):
        onnx_backend.complete_config(context_of(directory, options={"default-max-batch-size": "many"}))


@pytest.mark.parametrize("dims", [[2, 3], [], ["n"]])
def test_shapes_become_dims(onnx_backend, tmp_path: Path, dims: list) -> None:
    config = onnx_backend.complete_config(context_of(identity_model(tmp_path / "m", dims)))
    if dims == ["n"]:  # one scalar per row: an element that is reshaped away
        assert (config.max_batch_size, config.input[0].dims) == (4, (1,))
        assert config.input[0].reshape == ModelTensorReshape()
    else:
        assert config.max_batch_size == 0
        assert config.input[0].dims == (tuple(dims) or (1,))
        assert config.input[0].reshape is None


def test_dims_that_name_the_batch_dimension_ask_for_no_batching(onnx_backend, tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    (directory / "config.pbtxt").write_text('input { name: "x" dims: [ -1, 3 ] }')
    config = onnx_backend.complete_config(context_of(directory))
    assert (config.max_batch_size, config.dynamic_batching) == (0, None)
    assert config.output[0].dims == (-1, 3)


def test_a_partial_config_is_kept_and_filled(onnx_backend, tmp_path: Path) -> None:
    model = onnx_model(
        [value("a", ["n", "wide"]), value("b", ["n", 2])], [value("c", ["n", "wide"]), value("d", ["n", 2])]
    )
    directory = write_model(tmp_path / "m", model)
    (directory / "config.pbtxt").write_text('max_batch_size: 2 input { name: "a" dims: 5 } output { name: "d" }')
    config = onnx_backend.complete_config(context_of(directory))
    assert described(config.input) == [("a", Datatype.FP32, (5,)), ("b", Datatype.FP32, (2,))]
    assert described(config.output) == [("d", Datatype.FP32, (2,))]
    assert (config.max_batch_size, config.dynamic_batching) == (2, None)


def test_every_contradiction_is_reported_at_once(onnx_backend, tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", [2, 3])
    (directory / "config.pbtxt").write_text(
        'max_batch_size: 8 input { name: "x" data_type: TYPE_INT32 dims: [ 4 ] } output { name: "z" dims: 3 }'
    )
    with pytest.raises(ConfigError) as caught:
        onnx_backend.complete_config(context_of(directory))
    lines = [str(problem) for problem in caught.value.problems]
    assert [problem.field for problem in caught.value.problems] == [
        "max_batch_size",
        "input[0].data_type",
        "input[0].dims",
        "output[0].name",
    ]
    assert "expected 0, because the model's file does not batch: 'x' has shape [2, 3]" in lines[0]
    assert "expected TYPE_FP32 for 'x', got TYPE_INT32" in lines[1]
    assert "expected [3] for 'x' (the file's shape without its batch dimension), got [4]" in lines[2]
    assert "expected one of the file's outputs y, got 'z'" in lines[3]


def test_a_value_stored_in_the_file_may_come_with_a_request(onnx_backend, tmp_path: Path) -> None:
    model = onnx_model(
        [value("x", [2]), value("bias", [2])], [value("y", [2])], [helper.make_node("Add", ["x", "bias"], ["y"])]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "bias"))
    directory = write_model(tmp_path / "m", model)
    assert [spec.name for spec in onnx_backend.complete_config(context_of(directory)).input] == ["x"]
    (directory / "config.pbtxt").write_text(
        'input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }, '
        '{ name: "bias" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]'
    )
    context = context_of(directory)
    config = onnx_backend.complete_config(context)
    assert [spec.name for spec in config.input] == ["x", "bias"]
    instance = instance_of("onnxruntime", replace(context, config=config))
    zeros = np.zeros(2, np.float32)
    assert instance.run({"x": zeros})["y"].tolist() == [1, 1]
    assert instance.run({"x": zeros, "bias": zeros})["y"].tolist() == [0, 0]


def test_a_misspelt_name_gets_a_suggestion(onnx_backend, model_repository: Path) -> None:
    context = context_of(model_repository / "digits_onnx")
    (image,) = context.config.input
    config = replace(context.config, input=(replace(image, name="imgae"),))
    with pytest.raises(ConfigError, match=r"inputs image, got 'imgae'; did you mean image\?"):
        onnx_backend.complete_config(replace(context, config=config))


def test_a_batch_dimension_in_dims_is_explained(onnx_backend, tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    (directory / "config.pbtxt").write_text('max_batch_size: 8 input { name: "x" dims: [ -1, 3 ] }')
    with pytest.raises(ConfigError, match="dims leave the batch dimension out when max_batch_size > 0"):
        onnx_backend.complete_config(context_of(directory))


def test_without_completion_the_config_is_checked_all_the_same(onnx_backend, tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    (directory / "config.pbtxt").write_text('max_batch_size: 8 output { name: "y" data_type: TYPE_FP32 dims: 3 }')
    backend = onnx_backend(context_of(directory))
    backend.load()
    with pytest.raises(ConfigError, match="expected every input of the model's file, x missing"):
        backend.create_instance(Placement("m_0"))


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x08"])
def test_a_damaged_file_is_named(onnx_backend, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=rf"model.onnx \({len(content)} bytes\)"):
        onnx_backend.complete_config(context_of(tmp_path / "m"))


def test_a_missing_file_says_where_it_was_looked_for(onnx_backend, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no file .*/m/1/model.onnx"):
        onnx_backend.complete_config(context_of(tmp_path / "m"))


def test_a_directory_with_external_data_is_a_model(tmp_path: Path) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(1, 6)
    model = onnx_model(
        [value("x", ["n", 6])], [value("y", ["n", 6])], nodes=[helper.make_node("Add", ["x", "w"], ["y"])]
    )
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    place = tmp_path / "m" / "1" / "model.onnx"
    place.mkdir(parents=True)
    save_model(model, place / "graph.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    instance = instance_of("onnxruntime", context_of(tmp_path / "m"))
    assert np.array_equal(instance.run({"x": np.zeros((1, 6), np.float32)})["y"], weights)


def test_a_directory_must_hold_one_model(onnx_backend, tmp_path: Path) -> None:
    (tmp_path / "m" / "1" / "model.onnx").mkdir(parents=True)
    with pytest.raises(NotFoundError, match=r"a single .onnx file in directory .*, found none"):
        onnx_backend.complete_config(context_of(tmp_path / "m"))


def sequence_model() -> object:
    make = helper.make_node("SequenceConstruct", ["x"], ["s"])
    copy = helper.make_node("Identity", ["x"], ["y"])
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["n", 3])
    return onnx_model([value("x", ["n", 3])], [sequence, value("y", ["n", 3])], nodes=[make, copy])


def test_outputs_that_are_no_tensors_are_left_out_and_named(
    onnx_backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_model(tmp_path / "m", sequence_model())
    config = onnx_backend.complete_config(context_of(directory))
    assert [spec.name for spec in config.output] == ["y"]
    assert "not served: 's' (seq(tensor(float))); export the model with plain tensors" in caplog.text


@pytest.mark.parametrize(
    ("labels", "key_type", "columns"),
    [
        ({"classlabels_int64s": [3, 1, 2]}, TensorProto.INT64, [1, 2, 0]),
        ({"classlabels_strings": ["no", "maybe"]}, TensorProto.STRING, [1, 0]),
    ],
)
def test_a_map_for_each_row_is_a_tensor_by_ascending_keys(
    onnx_backend, tmp_path: Path, labels: dict, key_type: int, columns: list[int]
) -> None:
    """What classifiers of scikit-learn give by default."""
    count = len(columns)
    zip_map = helper.make_node("ZipMap", ["x"], ["probabilities"], domain="ai.onnx.ml", **labels)
    value_type = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    rows = helper.make_sequence_type_proto(helper.make_map_type_proto(key_type, value_type))
    model = onnx_model([value("x", ["n", count])], [helper.make_value_info("probabilities", rows)], [zip_map])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    directory = write_model(tmp_path / "m", model)
    for batching in ("", "max_batch_size: 4"):
        (directory / "config.pbtxt").write_text(batching)
        config = onnx_backend.complete_config(context_of(directory))
        (output,) = config.output
        assert (output.name, output.data_type) == ("probabilities", Datatype.FP32)
        instance = instance_of("onnxruntime", context_of(directory, config=config))
        x = np.arange(2 * count, dtype=np.float32).reshape(2, count)
        np.testing.assert_array_equal(instance.run({"x": x})["probabilities"], x[:, columns])


def test_asking_for_such_an_output_is_refused(onnx_backend, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", sequence_model())
    (directory / "config.pbtxt").write_text('output { name: "s" }')
    with pytest.raises(UnsupportedError, match=r"'s' is a seq\(tensor\(float\)\), which no KServe tensor can carry"):
        onnx_backend.complete_config(context_of(directory))


def test_unloading_lets_the_session_go(onnx_backend, tmp_path: Path) -> None:
    backend = loaded(onnx_backend, context_of(identity_model(tmp_path / "m", ["n", 3])))
    session = weakref.ref(backend.create_instance(Placement("m_0"))._session)
    backend.unload()
    assert session() is None

"""ONNX models executed: accuracy, every datatype, errors, threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.contexts import context_of, instance_of, loaded
from support.onnx_models import identity_model, onnx_model, value, write_model

from modelserver.backend import CancelledError, InternalError, InvalidArgumentError, Placement
from modelserver.backend.discovery import find_backend
from training.digits import held_out

DTYPES = {
    TensorProto.BOOL: "bool",
    TensorProto.UINT8: "uint8",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
    TensorProto.INT8: "int8",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.BFLOAT16: "uint16",
}


def test_digits_are_read_with_97_percent(model_repository: Path) -> None:
    images, labels = held_out()
    outputs = instance_of("onnxruntime", context_of(model_repository / "digits_onnx")).run({"image": images})
    assert np.mean(outputs["digit"][:, 0] == labels) >= 0.97
    assert np.array_equal(outputs["probabilities"].argmax(1), outputs["digit"][:, 0])
    assert np.allclose(outputs["probabilities"].sum(1), 1, atol=1e-5)


def test_arenas_that_shrink_after_each_run_change_no_answer(model_repository: Path, tmp_path: Path) -> None:
    images, _ = held_out()
    plain = context_of(model_repository / "digits_onnx")
    parameters = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    shrinking = replace(plain, config=replace(plain.config, parameters=parameters))
    expected = instance_of("onnxruntime", plain).run({"image": images})
    instance = instance_of("onnxruntime", shrinking)
    for _ in range(3):
        outputs = instance.run({"image": images})
        assert all(np.array_equal(outputs[name], expected[name]) for name in expected)
    bfloat16 = context_of(identity_model(tmp_path / "m", ["n", 3], TensorProto.BFLOAT16))
    instance = instance_of("onnxruntime", replace(bfloat16, config=replace(bfloat16.config, parameters=parameters)))
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    assert np.array_equal(instance.run({"x": array})["y"], array)


@pytest.mark.parametrize("model", ["digits_versions", "digits_versions_specific", "digits_versions_all"])
def test_each_version_reads_better_than_the_one_before(model_repository: Path, model: str) -> None:
    images, labels = held_out()
    accuracies = []
    for version in (1, 2, 3):
        instance = instance_of("onnxruntime", context_of(model_repository / model, version=version))
        accuracies.append(np.mean(instance.run({"image": images})["digit"][:, 0] == labels))
    assert accuracies == sorted(accuracies)
    assert accuracies[0] >= 0.97


@pytest.mark.parametrize("onnx_type", DTYPES)
def test_every_datatype_passes_through(tmp_path: Path, onnx_type: int) -> None:
    instance = instance_of("onnxruntime", context_of(identity_model(tmp_path / "m", ["n", 3], onnx_type)))
    array = np.array([[0, 1, 1], [1, 0, 1]], DTYPES[onnx_type])
    array.flags.writeable = False
    output = instance.run({"x": array})["y"]
    assert output.dtype == array.dtype
    assert np.array_equal(output, array)


def test_scalars_travel_as_one_element(tmp_path: Path) -> None:
    instance = instance_of("onnxruntime", context_of(identity_model(tmp_path / "m", [])))
    assert instance.run({"x": np.array([7], np.float32)})["y"].tolist() == [7]


@pytest.mark.parametrize("dims", ["[ 1 ]", "[ 1, 1 ]", "[ 1, 1, 1 ]"])
def test_a_config_may_give_scalars_any_dimensions_of_one(tmp_path: Path, dims: str) -> None:
    directory = identity_model(tmp_path / "m", [])
    tensors = "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}\n'
        for kind, name in (("input", "x"), ("output", "y"))
    )
    (directory / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{tensors}')
    array = np.full((1,) * dims.count("1"), 7, np.float32)
    output = instance_of("onnxruntime", context_of(directory)).run({"x": array})["y"]
    assert output.tolist() == array.tolist()


def test_strings_pass_through_as_bytes(tmp_path: Path) -> None:
    instance = instance_of("onnxruntime", context_of(identity_model(tmp_path / "m", ["n", 2], TensorProto.STRING)))
    array = np.array([[b"one", "zwei ü".encode()], [b"", b"a\0b"]], dtype=object)
    output = instance.run({"x": array})["y"]
    assert output.shape == (2, 2)
    assert output.tolist() == array.tolist()
    assert all(type(element) is bytes for element in output.flat)


def test_bytes_that_are_no_text_do_not_fail_the_batch(tmp_path: Path) -> None:
    instance = instance_of("onnxruntime", context_of(identity_model(tmp_path / "m", ["n", 1], TensorProto.STRING)))
    output = instance.run({"x": np.array([[b"good"], [b"\xff"]], dtype=object)})["y"]
    assert output[:, 0].tolist() == [b"good", "\N{REPLACEMENT CHARACTER}".encode()]


def test_an_empty_batch_of_columns_and_a_strided_array_work(tmp_path: Path) -> None:
    instance = instance_of("onnxruntime", context_of(identity_model(tmp_path / "m", ["n", "columns"])))
    assert instance.run({"x": np.zeros((2, 0), np.float32)})["y"].shape == (2, 0)
    strided = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert np.array_equal(instance.run({"x": strided})["y"], strided)


def test_inputs_that_the_graph_refuses_are_the_callers_fault(tmp_path: Path) -> None:
    instance = instance_of("onnxruntime", context_of(identity_model(tmp_path / "m", ["n", 3])))
    with pytest.raises(InvalidArgumentError, match="Got: 4 Expected: 3"):
        instance.run({"x": np.zeros((1, 4), np.float32)})
    with pytest.raises(InvalidArgumentError, match="missing from input feed"):
        instance.run({})


def test_values_that_an_operator_refuses_are_the_callers_fault_too(tmp_path: Path) -> None:
    gather = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    model = onnx_model(
        [value("x", ["n", 3]), value("i", ["n"], TensorProto.INT64)], [value("y", ["n", None])], nodes=[gather]
    )
    instance = instance_of("onnxruntime", context_of(write_model(tmp_path / "m", model)))
    with pytest.raises(InvalidArgumentError, match="idx=9 must be within"):
        instance.run({"x": np.zeros((1, 3), np.float32), "i": np.array([9])})


def test_a_failing_operator_is_an_internal_error(tmp_path: Path) -> None:
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = onnx_model(
        [value("x", ["n", 3]), value("shape", [2], TensorProto.INT64)], [value("y", ["a", "b"])], nodes=[reshape]
    )
    instance = instance_of("onnxruntime", context_of(write_model(tmp_path / "m", model)))
    with pytest.raises(InternalError, match=r"ONNX Runtime failed: .*cannot be reshaped"):
        instance.run({"x": np.zeros((1, 3), np.float32), "shape": np.array([2, 2])})


def test_only_the_configs_outputs_are_computed(model_repository: Path, tmp_path: Path) -> None:
    directory = tmp_path / "few"
    directory.mkdir()
    (directory / "1").symlink_to(model_repository / "digits_onnx" / "1")
    (directory / "config.pbtxt").write_text('output { name: "digit" }')
    outputs = instance_of("onnxruntime", context_of(directory)).run({"image": held_out()[0][:1]})
    assert list(outputs) == ["digit"]


def test_instances_of_one_device_share_a_session_and_run_at_once(model_repository: Path) -> None:
    images, _ = held_out()
    backend = loaded(find_backend("onnxruntime"), context_of(model_repository / "digits_onnx"))
    instances = [backend.create_instance(Placement(f"i{index}", index=index)) for index in range(4)]
    assert len({id(instance._session) for instance in instances}) == 1
    expected = instances[0].run({"image": images})["digit"]
    answers: list[bool] = []

    def run(instance: Any) -> None:
        answers.extend(np.array_equal(instance.run({"image": images})["digit"], expected) for _ in range(20))

    threads = [threading.Thread(target=run, args=(instance,)) for instance in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 80
    backend.unload()


def slow_model(directory: Path) -> Path:
    """Multiplies a matrix with itself, again and again: `n` times."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["m", "x"], ["next"]), helper.make_node("Identity", ["more"], ["still"])],
        "body",
        [value("i", [], TensorProto.INT64), value("more", [], TensorProto.BOOL), value("m", None)],
        [value("still", [], TensorProto.BOOL), value("next", None)],
    )
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], body=graph)
    squeeze = helper.make_node("Squeeze", ["count"], ["n"])
    inputs = [value("x", [64, 64]), value("count", [1], TensorProto.INT64)]
    return write_model(directory, onnx_model(inputs, [value("y", [64, 64])], nodes=[squeeze, loop]))


def test_a_run_that_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    instance = instance_of("onnxruntime", context_of(slow_model(tmp_path / "m")))
    x = np.eye(64, dtype=np.float32)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            instance.run({"x": x, "count": np.array([1 << 40])})
        except CancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    instance.interrupt(True)  # also where the run has not begun yet
    thread.join(60)
    assert len(raised) == 1
    instance.interrupt(False)
    assert np.array_equal(instance.run({"x": x, "count": np.array([3])})["y"], x)


def test_memory_may_be_given_back_every_few_runs(tmp_path: Path) -> None:
    parameters = {"memory.enable_memory_arena_shrinkage": "cpu:0", "arena_shrinkage_interval": "3"}
    plain = context_of(identity_model(tmp_path / "m", ["n", 3]))
    instance = instance_of("onnxruntime", replace(plain, config=replace(plain.config, parameters=parameters)))
    for number in range(7):
        assert instance.run({"x": np.full((1, 3), number, np.float32)})["y"][0, 0] == number


def test_instances_may_have_sessions_of_their_own(model_repository: Path) -> None:
    plain = context_of(model_repository / "digits_onnx")
    context = replace(plain, config=replace(plain.config, parameters={"share_session": "false"}))
    backend = loaded(find_backend("onnxruntime"), context)
    instances: list[Any] = [backend.create_instance(Placement(f"i{index}", index=index)) for index in range(2)]
    assert instances[0]._session is not instances[1]._session
    backend.unload()

"""PyTorch models executed: accuracy, conventions, every datatype, errors, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.contexts import context_of, instance_of, loaded, tensors
from support.torch_models import (
    Copy,
    Doubling,
    FromDict,
    Greeting,
    Keyworded,
    MaskedScale,
    Shouting,
    SumAndDifference,
    write_export,
    write_script,
)

from modelserver.backend import Datatype, InternalError, InvalidArgumentError, ModelConfig, Placement
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelInput, ModelOutput
from training.digits import held_out

FP32 = Datatype.FP32


def config_of(inputs: list[str], outputs: list[str], datatype: Datatype = FP32, **parameters: str) -> ModelConfig:
    return ModelConfig(
        input=tensors(ModelInput, **dict.fromkeys(inputs, (datatype, (-1,)))),
        output=tensors(ModelOutput, **dict.fromkeys(outputs, (datatype, (-1,)))),
        parameters=parameters,
    )


def instance(directory: Path, config: ModelConfig | None = None, **options: str) -> Any:
    return instance_of("pytorch", context_of(directory, config=config, options=options))


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_torchscript_reads_digits_with_97_percent(model_repository: Path) -> None:
    images, labels = held_out()
    outputs = instance(model_repository / "digits_torchscript").run({"image": images})
    assert np.mean(outputs["probabilities__0"].argmax(1) == labels) >= 0.97


def test_an_exported_program_reads_digits_with_97_percent(model_repository: Path) -> None:
    images, labels = held_out()
    exported = instance(model_repository / "digits_export")
    digits = [exported.run({"image": images[start : start + 64]})["digit"][:, 0] for start in range(0, len(images), 64)]
    assert np.mean(np.concatenate(digits) == labels) >= 0.97


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["left", "right"], ["OUTPUT__0", "OUTPUT__1"]),
        (["right", "left"], ["sum", "difference"]),
        (["INPUT__0", "INPUT__1"], ["sum", "difference"]),
    ],
)
def test_tritons_names_reach_a_script(tmp_path: Path, inputs: list[str], outputs: list[str]) -> None:
    added = instance(write_script(tmp_path, SumAndDifference()), config_of(inputs, outputs))
    ordered = inputs if inputs[0] != "right" else inputs[::-1]
    results = added.run(dict(zip(ordered, (vector(5), vector(3)), strict=True)))
    assert [results[name].item() for name in outputs] == [8, 2]


def test_one_of_two_results_may_be_all_that_is_wanted(tmp_path: Path) -> None:
    added = instance(write_script(tmp_path, SumAndDifference()), config_of(["left", "right"], ["OUTPUT__1"]))
    assert added.run({"left": vector(5), "right": vector(3)})["OUTPUT__1"].item() == 2


def test_dicts_in_and_out(tmp_path: Path) -> None:
    model = instance(write_script(tmp_path, FromDict()), config_of(["a", "b"], ["double", "total"]))
    results = model.run({"a": vector(5), "b": vector(3)})
    assert (results["double"].item(), results["total"].item()) == (10, 8)


def test_arguments_with_defaults_may_be_left_out(tmp_path: Path) -> None:
    directory = write_script(tmp_path, MaskedScale())
    assert instance(directory, config_of(["x"], ["y"])).run({"x": vector(2)})["y"].item() == 6
    masked = instance(directory, config_of(["mask", "x"], ["y"]))
    assert masked.run({"x": vector(2), "mask": vector(0)})["y"].item() == 0
    assert masked.run({"x": vector(2)})["y"].item() == 6


@pytest.mark.parametrize("datatype", [datatype for datatype in Datatype if datatype is not Datatype.BYTES])
def test_every_datatype_passes_through(tmp_path: Path, datatype: Datatype) -> None:
    copy = instance(write_script(tmp_path, Copy()), config_of(["x"], ["y"], datatype))
    array = np.array([0, 1, 1], datatype.numpy)
    output = copy.run({"x": array})["y"]
    assert output.dtype == array.dtype
    assert np.array_equal(output, array)


def test_bfloat16_is_computed_as_such(tmp_path: Path) -> None:
    doubled = instance(write_script(tmp_path, Doubling()), config_of(["x"], ["y"], Datatype.BF16))
    one_and_a_half, three = 0x3FC0, 0x4040
    assert doubled.run({"x": np.array([one_and_a_half], np.uint16)})["y"].tolist() == [three]


def test_a_model_cannot_write_into_received_bytes(tmp_path: Path) -> None:
    doubled = instance(write_script(tmp_path, Doubling()), config_of(["x"], ["y"]))
    received = vector(1, 2).tobytes()
    view = np.frombuffer(received, np.float32)
    assert doubled.run({"x": view})["y"].tolist() == [2, 4]
    assert view.tolist() == [1, 2]


def test_arrays_of_any_layout_are_taken(tmp_path: Path) -> None:
    copy = instance(write_script(tmp_path, Copy()), config_of(["x"], ["y"]))
    for array in (np.arange(6, dtype=np.float32)[::-2], np.zeros((0, 3), np.float32), np.float32(7)):
        assert np.array_equal(copy.run({"x": np.asarray(array)})["y"], array)


def test_an_exported_program_with_keywords_and_constants(tmp_path: Path) -> None:
    directory = write_export(tmp_path, Keyworded(), torch.ones(2, 3), 4, shift=torch.ones(2, 3))
    model = instance(directory)
    results = model.run({"x": np.full((2, 3), 2, np.float32), "shift": np.ones((2, 3), np.float32)})
    assert results["OUTPUT__0"].tolist() == [[9.0] * 3] * 2
    assert results["OUTPUT__1"].dtype == np.uint16


def test_an_exported_program_that_takes_a_dict(tmp_path: Path) -> None:
    directory = write_export(tmp_path, FromDict(), {"a": torch.ones(2), "b": torch.ones(2)})
    results = instance(directory).run({"b": vector(1, 2), "a": vector(10, 20)})
    assert results["total"].tolist() == [11, 22]


def test_scalars_travel_as_one_element(tmp_path: Path) -> None:
    model = instance(write_export(tmp_path, Copy(), torch.tensor(1.0)))
    assert model.run({"x": vector(7)})["OUTPUT__0"].tolist() == [7]


def test_a_batch_over_the_programs_bound_is_the_callers_fault(model_repository: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the exported program refuses the inputs: .*<= 64"):
        instance(model_repository / "digits_export").run({"image": np.zeros((65, 8, 8), np.float32)})


def test_a_failing_operator_is_told_in_one_line(model_repository: Path) -> None:
    with pytest.raises(InternalError) as caught:
        instance(model_repository / "digits_torchscript").run({"image": np.zeros((2, 8, 7), np.float32)})
    assert caught.value.message == "PyTorch failed: mat1 and mat2 shapes cannot be multiplied (2x384 and 512x64)"


@pytest.mark.parametrize(
    ("outputs", "datatype", "message"),
    [
        (["y"], Datatype.INT32, "configuration expects datatype TYPE_INT32 for output 'y', model provides TYPE_INT64"),
        (
            ["y", "z"],
            Datatype.INT64,
            "The output z in the model configuration refers to an output index which doesn't exist. This model has 1 ",
        ),
    ],
)
def test_results_that_the_config_does_not_describe(tmp_path: Path, outputs, datatype: Datatype, message: str) -> None:
    copy = instance(write_script(tmp_path, Copy()), config_of(["x"], outputs, datatype))
    with pytest.raises(InternalError, match=message):
        copy.run({"x": np.array([1], np.int64)})


def test_a_missing_key_names_the_keys(tmp_path: Path) -> None:
    model = instance(write_script(tmp_path, FromDict()), config_of(["a", "b"], ["product"]))
    with pytest.raises(InternalError, match="output 'product': the model gives a dict with the keys total, double"):
        model.run({"a": vector(5), "b": vector(3)})


@pytest.mark.parametrize("parameters", [{"INFERENCE_MODE": "false"}, {"DISABLE_OPTIMIZED_EXECUTION": "true"}])
def test_modes_do_not_change_the_answer(tmp_path: Path, parameters: dict[str, str]) -> None:
    copy = instance(write_script(tmp_path, Copy()), config_of(["x"], ["y"], **parameters))
    assert copy.run({"x": vector(1)})["y"].tolist() == [1]


def test_instances_of_one_device_share_weights_and_run_at_once(model_repository: Path) -> None:
    images, _ = held_out()
    backend = loaded(find_backend("pytorch"), context_of(model_repository / "digits_torchscript"))
    instances: list[Any] = [backend.create_instance(Placement(f"i{index}", index=index)) for index in range(4)]
    assert len({id(each._call) for each in instances}) == 1
    expected = instances[0].run({"image": images})["probabilities__0"].argmax(1)
    answers: list[bool] = []

    def run(each: Any) -> None:
        results = (each.run({"image": images})["probabilities__0"] for _ in range(5))
        answers.extend(np.array_equal(result.argmax(1), expected) for result in results)

    threads = [threading.Thread(target=run, args=(each,)) for each in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 20
    backend.unload()


def test_scripts_take_and_give_strings(tmp_path: Path) -> None:
    config = ModelConfig(
        input=tensors(ModelInput, names=(Datatype.BYTES, (-1,)), times=(FP32, (-1,))),
        output=tensors(ModelOutput, greetings=(Datatype.BYTES, (-1,)), doubled=(FP32, (-1,))),
    )
    names = np.array([b"Ada", "Zoë".encode(), b""], object)
    outputs = instance(write_script(tmp_path, Greeting()), config).run({"names": names, "times": vector(1, 2)})
    assert outputs["greetings"].tolist() == [b"hello Ada", "hello Zoë".encode(), b"hello "]
    assert outputs["doubled"].tolist() == [2, 4]


def test_a_list_of_strings_is_one_output(tmp_path: Path) -> None:
    shouting = instance(write_script(tmp_path, Shouting()), config_of(["text"], ["loud"], Datatype.BYTES))
    assert shouting.run({"text": np.array([b"ah", b"oh"], object)})["loud"].tolist() == [b"AH", b"OH"]
    assert shouting.run({"text": np.array([], object)})["loud"].tolist() == []


def test_strings_are_utf8(tmp_path: Path) -> None:
    shouting = instance(write_script(tmp_path, Shouting()), config_of(["text"], ["loud"], Datatype.BYTES))
    with pytest.raises(InvalidArgumentError, match="input 'text': TorchScript's strings are UTF-8"):
        shouting.run({"text": np.array([b"\xff"], object)})

"""Configs completed from, and checked against, what a model's file says."""

from __future__ import annotations

import pytest

from modelserver.config.completion import FileSignature, FileTensor, check, complete
from modelserver.config.schema import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelSequenceBatching,
    ModelTensorReshape,
)
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError

FP32 = Datatype.FP32


def signature(
    x: tuple[int, ...] | None = (-1, 3), y: tuple[int, ...] | None = (-1, 2), largest_batch: int | None = None
) -> FileSignature:
    return FileSignature((FileTensor("x", FP32, x),), (FileTensor("y", FP32, y),), largest_batch)


def completed(config: ModelConfig, file: FileSignature, default: int = 4) -> ModelConfig:
    return complete(config, file, default_max_batch_size=default, source="config.pbtxt")


@pytest.mark.parametrize(
    ("file", "default", "max_batch_size", "dims"),
    [
        (signature(), 4, 4, (3,)),
        (signature(), 1, 1, (3,)),
        (signature(), 0, 0, (-1, 3)),
        (signature(largest_batch=64), 4, 64, (3,)),
        (signature(y=(2,)), 4, 0, (-1, 3)),
        (signature(x=(5, 3)), 4, 0, (5, 3)),
        (signature(x=()), 4, 0, (1,)),
        (signature(x=None), 4, 4, ()),
    ],
)
def test_an_empty_config_becomes_what_the_file_says(
    file: FileSignature, default: int, max_batch_size: int, dims: tuple[int, ...]
) -> None:
    config = completed(ModelConfig(), file, default)
    assert config.max_batch_size == max_batch_size
    assert config.input == (ModelInput(name="x", data_type=FP32, dims=dims),)
    assert config.dynamic_batching == (ModelDynamicBatching() if max_batch_size > 1 else None)


def test_a_scheduler_that_was_chosen_stays() -> None:
    config = completed(ModelConfig(sequence_batching=ModelSequenceBatching()), signature())
    assert (config.max_batch_size, config.dynamic_batching) == (4, None)


def test_a_batch_size_that_was_chosen_stays_without_dynamic_batching() -> None:
    config = completed(ModelConfig(max_batch_size=16), signature())
    assert (config.max_batch_size, config.dynamic_batching) == (16, None)


def test_one_scalar_per_row_is_reshaped_away() -> None:
    (y,) = completed(ModelConfig(), signature(y=(-1,))).output
    assert (y.dims, y.reshape) == ((1,), ModelTensorReshape())


def test_what_is_written_is_kept() -> None:
    mine = ModelConfig(
        max_batch_size=8,
        input=(ModelInput(name="x", dims=(3, 1), reshape=ModelTensorReshape((3,))),),
        output=(ModelOutput(name="y", label_filename="labels.txt"),),
    )
    config = completed(mine, signature())
    assert config.input[0].dims == (3, 1)
    assert config.input[0].data_type is FP32
    assert (config.output[0].dims, config.output[0].label_filename) == ((2,), "labels.txt")


@pytest.mark.parametrize("dims", [(3,), (7,)])
def test_a_free_dimension_may_be_narrowed(dims: tuple[int, ...]) -> None:
    config = ModelConfig(max_batch_size=4, input=(ModelInput(name="x", data_type=FP32, dims=dims),))
    check(config, signature(x=(-1, -1)), source="config.pbtxt")


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (ModelConfig(max_batch_size=65), "max_batch_size", "expected at most 64"),
        (ModelConfig(input=(ModelInput(name="z", dims=(1,)),)), "input[0].name", "got 'z'"),
        (ModelConfig(input=(ModelInput(name="x", data_type=Datatype.INT8),)), "input[0].data_type", "TYPE_FP32"),
        (ModelConfig(max_batch_size=4, input=(ModelInput(name="x", dims=(-1,)),)), "input[0].dims", r"expected \[3\]"),
        (
            ModelConfig(max_batch_size=4, output=(ModelOutput(name="y", dims=(2, 2)),)),
            "output[0].dims",
            r"got \[2, 2\]",
        ),
        (
            ModelConfig(max_batch_size=4, input=(ModelInput(name="x", dims=(4,), reshape=ModelTensorReshape((4,))),)),
            "input[0].reshape",
            r"expected \[3\]",
        ),
    ],
)
def test_contradictions_name_their_field(config: ModelConfig, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        completed(config, signature(largest_batch=64))
    assert [problem.field for problem in caught.value.problems] == [field]  # type: ignore[attr-defined]


def test_a_fixed_batch_of_one_may_be_called_one() -> None:
    check(ModelConfig(max_batch_size=1, input=(ModelInput(name="x"),)), signature((1, 3), (1, 2)), source="c")
    with pytest.raises(ConfigError, match="does not batch"):
        check(ModelConfig(max_batch_size=2, input=(ModelInput(name="x"),)), signature((1, 3), (1, 2)), source="c")


def test_a_check_wants_every_input() -> None:
    with pytest.raises(ConfigError, match="every input of the model's file, x missing"):
        check(ModelConfig(), signature(), source="config.pbtxt")

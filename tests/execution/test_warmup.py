from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, load_model
from support.instances import Doubling, backend_of
from support.leaks import no_leaks

from modelserver.backend import BatchInstance
from modelserver.config.schema import (
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelSequenceBatching,
    ModelWarmup,
    SequenceControl,
    SequenceControlInput,
    WarmupInput,
)
from modelserver.core.datatype import Datatype
from modelserver.core.tensor import encode_bytes_elements
from modelserver.errors import InternalError, InvalidArgumentError, ServerError


class Seeing(Doubling):
    """Keeps the inputs of its batches."""

    def __init__(self, placement: Any, seen: list[np.ndarray]) -> None:
        super().__init__(placement)
        self.seen = seen

    def run(self, inputs: Any) -> Any:
        self.seen.append(inputs["IN"])
        return {"OUT": inputs["IN"]}


async def seen_by_warmup(directory: Path, *samples: ModelWarmup, **fields: Any) -> list[np.ndarray]:
    seen: list[np.ndarray] = []
    config = batching_config(model_warmup=samples, **fields)
    loop = asyncio.get_running_loop()
    backend = backend_of(lambda placement: Seeing(placement, seen))
    model = await asyncio.to_thread(load_model, backend, config, loop, directory)
    numbers = model.statistics.snapshot()
    assert numbers.execution_count == numbers.success.count == 0, "warmup is not traffic"
    await asyncio.to_thread(model.close)
    return seen


def sample(datatype: Datatype = Datatype.FP32, dims: tuple[int, ...] = (3,), **source: Any) -> WarmupInput:
    return WarmupInput(datatype, dims, **source)


async def test_every_instance_executes_every_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    warmups = (
        ModelWarmup("one", 4, {"IN": sample(zero_data=True)}, 2),
        ModelWarmup("two", 1, {"IN": sample(zero_data=True)}),
    )
    seen = await seen_by_warmup(tmp_path, *warmups, count=2)
    assert sorted(array.shape for array in seen) == sorted(2 * [(4, 3), (4, 3), (1, 3)])
    assert not any(array.any() for array in seen)
    assert "instance 'm_0_1': warmup sample 'one' took" in caplog.text


async def test_without_samples_nothing_runs(tmp_path: Path) -> None:
    assert await seen_by_warmup(tmp_path) == []


@pytest.mark.parametrize("datatype", list(Datatype))
@pytest.mark.parametrize("source", ["zero_data", "random_data"])
async def test_every_datatype(tmp_path: Path, datatype: Datatype, source: str) -> None:
    [array] = await seen_by_warmup(
        tmp_path,
        ModelWarmup("s", 2, {"IN": sample(datatype, (50,), **{source: True})}),
        input=(ModelInput("IN", datatype, dims=(-1,)),),
        output=(ModelOutput("OUT", datatype, dims=(-1,)),),
    )
    assert array.dtype == datatype.numpy
    assert array.shape == (2, 50)
    assert bool(array[0].any()) is (source == "random_data")
    np.testing.assert_array_equal(array[0], array[1])


@pytest.mark.parametrize("rows_in_file", [1, 2])
async def test_a_file_holds_one_item_or_all_rows(tmp_path: Path, rows_in_file: int) -> None:
    (tmp_path / "warmup").mkdir()
    data = np.arange(3 * rows_in_file, dtype=np.float32).reshape(rows_in_file, 3)
    (tmp_path / "warmup" / "data").write_bytes(data.tobytes())
    [array] = await seen_by_warmup(tmp_path, ModelWarmup("s", 2, {"IN": sample(input_data_file="data")}))
    np.testing.assert_array_equal(array, np.broadcast_to(data, (2, 3)))


async def test_a_file_without_batching_and_with_strings(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "text").write_bytes(encode_bytes_elements([b"one", b"", b"three"]))
    [array] = await seen_by_warmup(
        tmp_path,
        ModelWarmup("s", 0, {"IN": sample(Datatype.BYTES, input_data_file="text")}),
        max_batch_size=0,
        input=(ModelInput("IN", Datatype.BYTES, dims=(3,)),),
        output=(ModelOutput("OUT", Datatype.BYTES, dims=(3,)),),
    )
    assert array.tolist() == [b"one", b"", b"three"]


async def test_a_sample_without_inputs_is_skipped(tmp_path: Path) -> None:
    assert await seen_by_warmup(tmp_path, ModelWarmup("the sample", 1, {})) == []


@pytest.mark.parametrize(
    ("inputs", "batch_size", "problem"),
    [
        ({"IN": sample(zero_data=True)}, 9, "batch-size must be <= 8"),
        ({"OTHER": sample(zero_data=True)}, 1, "unexpected inference input 'OTHER'"),
        ({"IN": sample(Datatype.INT8, zero_data=True)}, 1, "data-type"),
        ({"IN": sample(dims=(-1,), zero_data=True)}, 1, "needs fixed sizes"),
        ({"IN": WarmupInput(None, (1,), zero_data=True)}, 1, "has no data_type"),
        ({"IN": sample(input_data_file="missing")}, 1, "cannot read"),
        ({"IN": sample(input_data_file="../secret")}, 1, "leaves"),
        ({"IN": sample(input_data_file="short")}, 2, "Expected 24, got 4"),
    ],
)
async def test_a_sample_that_does_not_fit_fails_the_load(
    tmp_path: Path, inputs: dict[str, WarmupInput], batch_size: int, problem: str
) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"1234")
    (tmp_path / "secret").write_bytes(bytes(12))
    with no_leaks(), pytest.raises(ServerError) as caught:
        await seen_by_warmup(tmp_path, ModelWarmup("the sample", batch_size, inputs))
    assert "failed to run warmup sample 'the sample': " in caught.value.message
    assert problem in caught.value.message
    assert caught.value.code is InvalidArgumentError.code


async def test_an_instance_that_fails_fails_the_load_and_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Doubling] = []

    class Broken(Doubling):
        def run(self, inputs: Any) -> Any:
            raise RuntimeError("out of memory")

    def make(placement: Any) -> Doubling:
        made.append(Broken(placement))
        return made[-1]

    config = batching_config(model_warmup=(ModelWarmup("s", 1, {"IN": sample(zero_data=True)}),))
    with pytest.raises(ServerError, match=r"'s': instance 'm_0_0' failed: RuntimeError: out of memory") as caught:
        await asyncio.to_thread(load_model, backend_of(make), config, asyncio.get_running_loop(), tmp_path)
    assert caught.value.code is InternalError.code
    assert made[0].is_closed


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        ("true", [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("3-5", [(1, 3), (1, 5), (2, 3), (2, 5), (4, 3), (4, 5), (8, 3), (8, 5)]),
        ("IN=7-7", [(1, 7), (2, 7), (4, 7), (8, 7)]),
        ("false", []),
    ],
)
async def test_automatic_warmup_covers_sizes_of_batches_and_dims(
    tmp_path: Path, value: str, shapes: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen = await seen_by_warmup(
        tmp_path,
        parameters={"auto_warmup": value},
        dynamic_batching=ModelDynamicBatching(preferred_batch_size=(2, 4)),
    )
    assert [array.shape for array in seen] == shapes
    if value == "3-5":
        assert "warmup sample 'auto rows=8 dims=max' took" in caplog.text


async def test_automatic_warmup_comes_after_the_samples(tmp_path: Path) -> None:
    written = ModelWarmup("one", 3, {"IN": sample(zero_data=True)})
    seen = await seen_by_warmup(tmp_path, written, parameters={"auto_warmup": "true"})
    assert [array.shape for array in seen] == [(3, 3), (1, 1), (8, 1)]


async def test_each_row_of_a_sample_is_a_sequence(tmp_path: Path) -> None:
    seen = await seen_by_warmup(
        tmp_path, ModelWarmup("s", 3, {"IN": sample(zero_data=True)}), sequence_batching=ModelSequenceBatching()
    )
    assert [array.shape for array in seen] == [(1, 3)] * 3


async def test_a_sample_may_name_the_controls_of_a_sequence(tmp_path: Path) -> None:
    start = SequenceControlInput("START", (SequenceControl(int32_false_true=(0, 1)),))
    inputs = {"IN": sample(zero_data=True), "START": sample(Datatype.INT32, (1,), zero_data=True)}
    seen = await seen_by_warmup(
        tmp_path, ModelWarmup("s", 2, inputs), sequence_batching=ModelSequenceBatching(control_input=(start,))
    )
    assert [array.shape for array in seen] == [(1, 3)] * 2


class Failing(Doubling):
    def run(self, inputs: Any) -> Any:
        raise ValueError(f"{len(inputs['IN'])} rows are too many")


async def test_a_model_that_fails_when_warmed_up_does_not_load(tmp_path: Path) -> None:
    config = batching_config(parameters={"auto_warmup": "true"})
    loop = asyncio.get_running_loop()
    with (
        no_leaks(),
        pytest.raises(ServerError, match=r"failed to run warmup sample 'auto rows=1': .*1 rows are too many"),
    ):
        await asyncio.to_thread(load_model, backend_of(Failing), config, loop, tmp_path)


async def test_the_time_of_the_warmup_is_a_number(tmp_path: Path) -> None:
    class Slow(Doubling):
        def run(self, inputs: Any) -> Any:
            time.sleep(0.01)
            return super().run(inputs)

    config = batching_config(parameters={"auto_warmup": "true"})
    model = await asyncio.to_thread(load_model, backend_of(Slow), config, asyncio.get_running_loop(), tmp_path)
    await asyncio.to_thread(model.close)
    assert model.load_duration_s > model.statistics.snapshot().warmup_s >= 0.02


class Later(BatchInstance):
    """Refuses, in place of its sender."""

    answers_later = True

    def execute(self, requests: Any) -> Any:
        return [InvalidArgumentError("there is no prompt") for _ in requests]


async def test_what_an_instance_that_answers_later_refuses_is_told(tmp_path: Path) -> None:
    config = batching_config(parameters={"auto_warmup": "true"})
    loop = asyncio.get_running_loop()
    with pytest.raises(ServerError, match=r"'auto rows=1': there is no prompt; auto_warmup sends zeros"):
        await asyncio.to_thread(load_model, backend_of(lambda _: Later()), config, loop, tmp_path)


async def test_automatic_texts_are_not_empty(tmp_path: Path) -> None:
    texts = (ModelInput("IN", Datatype.BYTES, dims=(-1,)),)
    seen = await seen_by_warmup(
        tmp_path,
        parameters={"auto_warmup": "2-2"},
        input=texts,
        output=(ModelOutput("OUT", Datatype.BYTES, dims=(-1,)),),
    )
    assert seen[0].tolist() == [[b"0", b"0"]]

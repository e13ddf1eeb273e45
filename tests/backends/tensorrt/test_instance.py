"""Our side of an execution, over a stand-in that computes on the CPU and knows the order of TensorRT's calls.

None of this shows that TensorRT works: `python -m gpu` does, on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.tensorrt import instance as instance_module
from modelserver_backends.tensorrt.engine import LoadedEngine
from modelserver_backends.tensorrt.engine_info import EngineInfo
from modelserver_backends.tensorrt.graph_rules import graph_shapes
from modelserver_backends.tensorrt.instance import InstanceSettings, TensorRTInstance
from modelserver_backends.tensorrt.instance_settings import instance_settings
from modelserver_backends.tensorrt.runtime_cache import RuntimeCache
from support.cpu_tensorrt import load
from support.engines import batching_engine, context_with, engine, tensor
from support.fake_cuda import FakeCuda
from support.fake_torch_cuda import Event, array_over

from modelserver.backend import ConfigError, DeviceArray, InternalError, InvalidArgumentError, UnavailableError
from modelserver.platform.cuda import Cuda

Arrays = Mapping[str, Any]
TWO_PROFILES = engine(
    tensor("in", -1, -1),
    tensor("out", -1, -1),
    profiles=[{"in": ((1, 1), (2, 8), (4, 16))}, {"in": ((2, 16), (2, 64), (4, 128))}],
)


def instance(
    info: EngineInfo,
    compute: Any,
    text: str = "",
    *,
    profiles: tuple[int, ...] = (0,),
    growing: frozenset[str] = frozenset(),
) -> tuple[TensorRTInstance, LoadedEngine]:
    loaded = load(info, compute, growing=growing)
    context = context_with(text)
    graphs, _ = graph_shapes(context.config, info)
    settings = instance_settings(context, profiles, graphs)
    return TensorRTInstance(loaded, context.config, settings, RuntimeCache(None), name="m_0"), loaded


def doubled(inputs: Arrays) -> Arrays:
    return {"out": inputs["in"] * 2}


def rows(count: int, size: int = 16) -> Any:
    return np.arange(count * size, dtype=np.float32).reshape(count, size)


def test_batches_of_any_size_are_computed() -> None:
    made, _ = instance(batching_engine(8), doubled, "max_batch_size: 8")
    for count in (1, 3, 8):
        assert np.array_equal(made.run({"in": rows(count)})["out"], rows(count) * 2)
    made.close()


def test_outputs_are_copied_by_a_stream_of_their_own_when_they_are_there() -> None:
    text = "max_batch_size: 8 optimization { cuda { output_copy_stream: true } }"
    made, _ = instance(batching_engine(8), doubled, text)
    for count in (2, 5):
        assert np.array_equal(made.run({"in": rows(count)})["out"], rows(count) * 2)
    made.close()


def test_what_no_profile_takes_is_refused() -> None:
    made, _ = instance(batching_engine(8), doubled, "max_batch_size: 8")
    with pytest.raises(InvalidArgumentError, match="dimension 1 to be between 16 and 16 but received 17"):
        made.run({"in": rows(1, 17)})
    with pytest.raises(InvalidArgumentError, match="input 'in' is missing"):
        made.run({})


def test_a_failed_execution_is_an_error_of_the_batch() -> None:
    made, loaded = instance(batching_engine(8), doubled, "max_batch_size: 8")
    loaded.engine.fails = True
    with pytest.raises(InternalError, match="the execution failed: TensorRT says nothing"):
        made.run({"in": rows(1)})
    loaded.engine.fails = False
    assert len(made.run({"in": rows(2)})["out"]) == 2


@pytest.mark.parametrize(
    "more", ["", "output_copy_stream: true", "graphs: true graph_spec [ { batch_size: 3 } ]"], ids=str.split
)
def test_what_a_failed_execution_has_queued_is_done_before_it_fails(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may write to its memory, or give it back, as soon as the request has failed."""
    made, loaded = instance(batching_engine(8), doubled, f"max_batch_size: 8 optimization {{ cuda {{ {more} }} }}")
    given, place = rows(3), np.zeros(256, np.uint8)

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Event, "record", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        made.run_on_device({"in": array_over(given)}, {"out": array_over(place)})
    assert not any(stream.work for stream in loaded.engine.gpu.streams)


def test_an_instance_is_not_ready_on_a_gpu_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = instance(batching_engine(8), doubled, "max_batch_size: 8")
    assert made.is_ready()
    monkeypatch.setattr(instance_module, "device_loss", lambda: "an illegal memory access was encountered")
    assert not made.is_ready()


def test_each_profile_has_a_context_and_the_nearest_is_taken() -> None:
    made, loaded = instance(TWO_PROFILES, doubled, "max_batch_size: 4", profiles=(0, 1))
    assert loaded.engine.num_contexts == 2
    for size in (1, 16, 100):
        assert made.run({"in": rows(2, size)})["out"].shape == (2, size)


def test_small_batches_are_filled_up_and_cut_again() -> None:
    seen = []

    def compute(inputs: Arrays) -> Arrays:
        seen.append(len(inputs["in"]))
        return doubled(inputs)

    info = engine(tensor("in", -1, 4), tensor("out", -1, 4), profiles=[{"in": ((4, 4), (4, 4), (8, 4))}])
    made, _ = instance(info, compute, "max_batch_size: 8")
    assert np.array_equal(made.run({"in": rows(2, 4)})["out"], rows(2, 4) * 2)
    assert set(seen) == {4}


def test_shape_tensors_get_the_batch_in_front() -> None:
    def expanded(inputs: Arrays) -> Arrays:
        shape = inputs["in_shape"]
        return {"out": np.ones(tuple(shape), np.float32), "out_shape": shape.astype(np.int64)}

    info = engine(
        tensor("in", -1, 2),
        tensor("in_shape", 3, kind="INT32", is_shape=True),
        tensor("out", -1, -1, -1),
        tensor("out_shape", 3, kind="INT64", is_shape=True),
        profiles=[{"in": ((1, 2), (2, 2), (4, 2)), "in_shape": ((1, 1, 1), (2, 4, 4), (4, 8, 8))}],
    )
    made, _ = instance(info, expanded, "max_batch_size: 4")
    outputs = made.run({"in": rows(3, 2), "in_shape": np.array([4, 5], np.int32)})
    assert outputs["out"].shape == (3, 4, 5)
    assert outputs["out_shape"].tolist() == [[4, 5]] * 3
    held = outputs["out_shape"]
    assert made.run({"in": rows(1, 2), "in_shape": np.array([7, 8], np.int32)})["out_shape"].tolist() == [[7, 8]]
    assert held.tolist() == [[4, 5]] * 3
    with pytest.raises(InvalidArgumentError, match="The shape value at index 2 is expected to be in range from 1 to 8"):
        made.run({"in": rows(3, 2), "in_shape": np.array([4, 9], np.int32)})


def test_a_shape_tensor_that_was_answered_is_not_written_again() -> None:
    info = engine(
        tensor("in_shape", 2, kind="INT64", is_shape=True),
        tensor("out_shape", 2, kind="INT64", is_shape=True),
        profiles=[{"in_shape": ((1, 1), (2, 4), (8, 8))}],
    )
    made, _ = instance(info, lambda inputs: {"out_shape": inputs["in_shape"] * 2})
    held = [made.run({"in_shape": np.array([size, 8])})["out_shape"] for size in (3, 4, 5)]
    assert [array.tolist() for array in held] == [[6, 16], [8, 16], [10, 16]]


def test_outputs_whose_shape_depends_on_the_data() -> None:
    def nonzero(inputs: Arrays) -> Arrays:
        return {"out": np.flatnonzero(inputs["in"]).astype(np.int64)}

    info = engine(tensor("in", 8), tensor("out", -1, kind="INT64"))
    made, _ = instance(info, nonzero, growing=frozenset({"out"}))
    held = []
    for step in (1, 3, 9, 2):
        array = (np.arange(8) % step == step - 1).astype(np.float32)
        held.append((made.run({"in": array})["out"], np.flatnonzero(array)))
    # What an execution gave is nobody else's afterwards.
    assert all(np.array_equal(ours, theirs) for ours, theirs in held)


def test_scalars_have_one_element_on_the_wire() -> None:
    info = engine(tensor("in"), tensor("out"))
    made, _ = instance(info, doubled)
    assert made.run({"in": np.array([3], np.float32)})["out"].tolist() == [6]


def test_graphs_serve_their_sizes_and_the_rest_goes_without() -> None:
    text = (
        'max_batch_size: 8 input [ { name: "in" data_type: TYPE_FP32 dims: [ 16 ] } ] '
        "optimization { cuda { graphs: true "
        "graph_spec [ { batch_size: 1 }, { batch_size: 4 graph_lower_bound { batch_size: 3 } } ] } }"
    )
    made, loaded = instance(batching_engine(8), doubled, text)
    assert loaded.engine.num_contexts == 3  # one for each graph, and the profile's
    for count in (1, 2, 3, 4, 3, 8):
        assert np.array_equal(made.run({"in": rows(count)})["out"], rows(count) * 2)
    counts = {measurement.name: measurement.value for measurement in made.measure()}
    assert counts == {"modelserver_tensorrt_graph_replays": 4, "modelserver_tensorrt_graph_misses": 2}
    made.close()


def test_a_graph_that_cannot_be_captured_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    text = (
        'max_batch_size: 8 input [ { name: "in" data_type: TYPE_FP32 dims: [ -1 ] } ] '
        "optimization { cuda { graphs: true "
        'graph_spec [ { batch_size: 8 input { key: "in" value { dim: [ 99 ] } } } ] } }'
    )
    made, _ = instance(batching_engine(8), doubled, text)
    assert "instance 'm_0': no CUDA graph" in caplog.text
    assert made.measure() == ()
    assert len(made.run({"in": rows(2)})["out"]) == 2


def test_ragged_batches_are_passed_on_as_they_are() -> None:
    text = 'max_batch_size: 4 input [ { name: "in" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]'
    info = engine(tensor("in", -1), tensor("out", -1), profiles=[{"in": ((6,), (8,), (64,))}])
    made, _ = instance(info, doubled, text)
    assert made.run({"in": np.ones(9, np.float32)})["out"].shape == (9,)


def test_settings_are_read_from_the_config() -> None:
    text = (
        "optimization { priority: PRIORITY_MAX input_pinned_memory { enable: false } "
        "cuda { busy_wait_events: true output_copy_stream: true } } "
        'parameters { key: "execution_context_allocation_strategy" value { string_value: "ON_PROFILE_CHANGE" } }'
    )
    assert instance_settings(context_with(text), (1,), ()) == InstanceSettings(
        profiles=(1,),
        allocation_strategy="ON_PROFILE_CHANGE",
        is_urgent=True,
        busy_waits=True,
        has_copy_stream=True,
        is_input_pinned=False,
    )
    assert instance_settings(context_with(), (0,), ()) == InstanceSettings()
    with pytest.raises(ConfigError, match="expected one of STATIC, ON_PROFILE_CHANGE, got 'DYNAMIC'"):
        instance_settings(context_with(text.replace("ON_PROFILE_CHANGE", "DYNAMIC")), (0,), ())


@pytest.mark.parametrize(
    "more", ["", "output_copy_stream: true", "graphs: true graph_spec [ { batch_size: 3 } ]"], ids=str.split
)
def test_registered_memory_is_read_and_written_where_it_lies(more: str) -> None:
    made, _ = instance(batching_engine(8), doubled, f"max_batch_size: 8 optimization {{ cuda {{ {more} }} }}")
    given, place = rows(3), np.zeros(256, np.uint8)
    out = made.run_on_device({"in": array_over(given)}, {"out": array_over(place)})["out"]
    if "graph_spec" in more:  # its memory is its own
        assert np.array_equal(out, given * 2)
    else:
        assert isinstance(out, DeviceArray)
        assert (out.address, out.shape, out.dtype) == (place.ctypes.data, (3, 16), np.dtype(np.float32))
        assert np.array_equal(place.view(np.float32)[: 3 * 16].reshape(3, 16), given * 2)
    # What is too large for its place is an array, and nothing is written.
    place[:] = 7
    larger = rows(8)
    assert np.array_equal(made.run_on_device({"in": array_over(larger)}, {"out": array_over(place)})["out"], larger * 2)
    assert (place == 7).all()
    made.close()


def test_batches_that_are_filled_up_are_copied() -> None:
    """Their place has no room for the rows that are filled in."""
    info = engine(tensor("in", -1, 4), tensor("out", -1, 4), profiles=[{"in": ((4, 4), (4, 4), (8, 4))}])
    made, _ = instance(info, doubled, "max_batch_size: 8")
    given, place = rows(2, 4), np.zeros(64, np.uint8)
    cuda = FakeCuda()
    memory = cuda.allocate(given.nbytes)
    memory.memory[:] = given.tobytes()
    array = DeviceArray(Cuda(cuda), 0, memory.address, given.dtype, given.shape)
    assert np.array_equal(made.run_on_device({"in": array}, {"out": array_over(place)})["out"], given * 2)
    assert not place.any()


def test_a_profile_that_tensorrt_refuses_is_an_error_with_its_reason() -> None:
    loaded = load(batching_engine(8), doubled)
    loaded.info = TWO_PROFILES
    settings = InstanceSettings(profiles=(0, 1))
    with pytest.raises(InternalError, match="optimization profile 1 cannot be set: TensorRT says nothing"):
        TensorRTInstance(loaded, context_with().config, settings, RuntimeCache(None), name="m_0")


def test_a_batch_without_memory_is_refused_and_the_next_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, loaded = instance(batching_engine(8), doubled, "max_batch_size: 8")

    def fail(_num_bytes: int) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.device, "empty", fail)
        with pytest.raises(UnavailableError, match="send fewer rows at once, or unload a model: CUDA out of memory"):
            made.run({"in": rows(8)})
    assert np.array_equal(made.run({"in": rows(8)})["out"], rows(8) * 2)

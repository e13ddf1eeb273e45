"""What contexts take of a device's memory is promised before they are made, and given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from modelserver_backends.tensorrt.engine import LoadedEngine
from modelserver_backends.tensorrt.graph_rules import graph_shapes
from modelserver_backends.tensorrt.instance import TensorRTInstance, scratch_bytes
from modelserver_backends.tensorrt.instance_settings import InstanceSettings, instance_settings
from modelserver_backends.tensorrt.runtime_cache import RuntimeCache
from support.cpu_tensorrt import Engine, load
from support.engines import batching_engine, context_with

from modelserver.backend import DeviceMemory, InternalError, UnavailableError, device_memory

IO = 'max_batch_size: 8 input [ { name: "in" data_type: TYPE_FP32 dims: [ 16 ] } ]'
SIZE = Engine.device_memory_size_v2


def doubled(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"out": inputs["in"] * 2}


@pytest.fixture
def loaded() -> LoadedEngine:
    found = load(batching_engine(8), doubled)
    found.device.name = "cuda:8"  # of this file alone: others leave instances behind
    return found


@pytest.fixture
def budget(loaded: LoadedEngine) -> Iterator[DeviceMemory]:
    found = device_memory(loaded.device.name)
    assert found.reserved_bytes == 0
    yield found
    assert found.reserved_bytes == 0, "everything is given back"


def settings_of(loaded: LoadedEngine, text: str = "max_batch_size: 8") -> InstanceSettings:
    context = context_with(text)
    shapes, _ = graph_shapes(context.config, loaded.info)
    return instance_settings(context, (0,), shapes)


def test_each_profile_has_a_context_and_graphs_share_one(loaded: LoadedEngine) -> None:
    assert scratch_bytes(loaded, InstanceSettings()) == SIZE
    assert scratch_bytes(loaded, InstanceSettings((0, 1))) == 2 * SIZE
    assert scratch_bytes(loaded, InstanceSettings((0, 1), "ON_PROFILE_CHANGE")) == SIZE + SIZE // 2
    graphs = settings_of(loaded, f"{IO} optimization {{ cuda {{ graphs: true }} }}")
    assert len(graphs.graphs) > 1
    assert scratch_bytes(loaded, graphs) == 2 * SIZE


def test_instances_take_and_give_back(loaded: LoadedEngine, budget: DeviceMemory) -> None:
    config = context_with("max_batch_size: 8").config
    made = [
        TensorRTInstance(loaded, config, settings_of(loaded), RuntimeCache(None), name=f"m_{index}")
        for index in range(2)
    ]
    assert budget.reserved_bytes == 2 * SIZE
    for instance in made:
        instance.close()


def test_what_does_not_fit_is_told_at_load(loaded: LoadedEngine, budget: DeviceMemory) -> None:
    loaded.device.num_free_bytes = SIZE - 1  # type: ignore[attr-defined]
    config = context_with("max_batch_size: 8").config
    with pytest.raises(UnavailableError, match=rf"'m_0' on cuda:8 needs {SIZE} bytes for its execution contexts"):
        TensorRTInstance(loaded, config, settings_of(loaded), RuntimeCache(None), name="m_0")


def test_an_instance_that_fails_keeps_nothing(loaded: LoadedEngine, budget: DeviceMemory) -> None:
    loaded.engine.create_execution_context = lambda strategy: None
    config = context_with("max_batch_size: 8").config
    with pytest.raises(InternalError, match="TensorRT makes no execution context"):
        TensorRTInstance(loaded, config, settings_of(loaded), RuntimeCache(None), name="m_0")

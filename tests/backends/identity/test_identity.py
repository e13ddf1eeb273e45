"""The identity backend: what goes in comes out."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from support.contexts import context_of, instance_of, loaded, request_of, tensors

from modelserver.backend import ConfigError, Datatype, ModelConfig, Placement
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelInput, ModelOutput


def config_of(datatype: Datatype = Datatype.FP32, **parameters: str) -> ModelConfig:
    return ModelConfig(
        max_batch_size=8,
        input=tensors(ModelInput, a=(datatype, (-1,)), b=(datatype, (-1,))),
        output=tensors(ModelOutput, x=(datatype, (-1,)), y=(datatype, (-1,))),
        parameters=parameters,
    )


@pytest.mark.parametrize("datatype", list(Datatype))
def test_output_i_is_input_i_whatever_the_datatype(tmp_path: Path, datatype: Datatype) -> None:
    instance = instance_of("identity", context_of(tmp_path, config=config_of(datatype)))
    first, second = np.zeros((1, 2), datatype.numpy), np.ones((1, 3), datatype.numpy)
    (response,) = instance.execute([request_of(b=second, a=first)])
    outputs = {tensor.name: tensor for tensor in response.outputs}
    assert outputs["x"].data is first
    assert outputs["y"].data is second


def test_every_request_gets_its_own_response(tmp_path: Path) -> None:
    instance = instance_of("identity", context_of(tmp_path, config=config_of()))
    requests = [request_of(a=np.full((1, 1), i, np.float32)) for i in range(3)]
    responses = instance.execute(requests)
    assert [response.outputs[0].data.item() for response in responses] == [0, 1, 2]


def test_outputs_must_mirror_the_inputs(tmp_path: Path) -> None:
    config = ModelConfig(
        input=tensors(ModelInput, a=(Datatype.FP32, (1,))), output=tensors(ModelOutput, x=(Datatype.INT32, (1,)))
    )
    with pytest.raises(ConfigError, match="as many outputs as inputs, of the same datatypes"):
        find_backend("identity")(context_of(tmp_path, config=config))


def test_it_runs_inline_only_without_a_delay(tmp_path: Path) -> None:
    identity = find_backend("identity")
    assert loaded(identity, context_of(tmp_path, config=config_of())).runs_inline
    assert not loaded(identity, context_of(tmp_path, config=config_of(execute_delay_ms="1"))).runs_inline


@pytest.mark.parametrize(("multiplier", "index", "expected_ms"), [("0", 3, 5), ("2", 0, 5), ("2", 1, 10), ("2", 2, 20)])
def test_delays_grow_with_the_instance(tmp_path: Path, multiplier: str, index: int, expected_ms: int) -> None:
    config = config_of(execute_delay_ms="5", instance_wise_delay_multiplier=multiplier)
    backend = loaded(find_backend("identity"), context_of(tmp_path, config=config))
    instance = backend.create_instance(Placement("slow", index=index))
    started = time.monotonic()
    instance.execute([])  # type: ignore[union-attr]
    assert time.monotonic() - started >= expected_ms / 1000


def test_a_delay_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parameter execute_delay_ms: expected a number, got 'soon'"):
        find_backend("identity")(context_of(tmp_path, config=config_of(execute_delay_ms="soon")))


def test_the_tutorial_stays_short() -> None:
    source = Path(__file__).parents[3] / "backends/identity/__init__.py"
    assert len(source.read_text().splitlines()) < 60


def test_the_example_model_echoes(model_repository: Path) -> None:
    instance = instance_of("identity", context_of(model_repository / "identity"))
    array = np.arange(16, dtype=np.float32).reshape(1, 16)
    (response,) = instance.execute([request_of(INPUT0=array)])
    assert response.outputs[0].name == "OUTPUT0"
    assert response.outputs[0].data is array

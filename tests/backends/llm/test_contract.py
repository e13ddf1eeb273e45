"""A language model's config, completed."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.contract import OUTPUTS, RETURNS, complete_config

from modelserver.config.schema import (
    InstanceGroupKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelTransactionPolicy,
)
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError

# Those of a model that generates; a classifier has others.
GENERATED = OUTPUTS.keys() - {"scores", "label", "token_scores", "token_embeddings"}


def test_everything_is_filled_in() -> None:
    config = complete_config(ModelConfig(name="m", backend="llm"), max_model_len=512)
    inputs = {spec.name: spec for spec in config.input}
    assert all(spec.optional for spec in config.input)
    assert RETURNS.keys() <= inputs.keys()
    assert (inputs["text_input"].data_type, inputs["text_input"].dims) == (Datatype.BYTES, (1,))
    assert (inputs["input_ids"].data_type, inputs["input_ids"].dims) == (Datatype.INT32, (-1,))
    assert {spec.name: spec.data_type for spec in config.output} == {name: OUTPUTS[name] for name in GENERATED}
    assert config.is_decoupled
    assert [(group.kind, group.count) for group in config.instance_group] == [(InstanceGroupKind.KIND_MODEL, 1)]
    assert config.parameters["max_model_len"] == "512"


def test_what_a_config_of_tritons_vllm_backend_leaves_out_is_added() -> None:
    given = ModelConfig(
        name="m",
        backend="vllm",
        max_batch_size=8,
        input=(ModelInput("text_input", Datatype.BYTES, dims=(1,)),),
        output=(ModelOutput("text_output", Datatype.BYTES, dims=(-1,)),),
    )
    config = complete_config(given)
    assert (config.backend, config.max_batch_size, config.is_decoupled) == ("vllm", 0, True)
    assert RETURNS.keys() < {spec.name for spec in config.input if spec.optional}
    assert sorted(spec.name for spec in config.output) == sorted(GENERATED)


def test_what_the_config_says_stays() -> None:
    given = ModelConfig(
        name="m",
        input=(ModelInput("text_input", Datatype.BYTES, dims=(1,)),),
        output=(ModelOutput("text_output", Datatype.BYTES, dims=(-1,)),),
        parameters={"max_model_len": "64", "dtype": "float32"},
        instance_group=(ModelInstanceGroup("g", InstanceGroupKind.KIND_CPU, 2),),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    )
    assert complete_config(given, max_model_len=512) == given


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_size": 8}, "max_batch_size: expected 0, got 8"),
        ({"model_transaction_policy": ModelTransactionPolicy(decoupled=False)}, "expected decoupled: true"),
        ({"input": (ModelInput("prompt", Datatype.BYTES, dims=(1,)),)}, "input 'prompt': this model has text_in"),
        ({"input": (ModelInput("stream", Datatype.INT32, dims=(1,)),)}, "expected data_type TYPE_BOOL, got TYPE_INT32"),
        ({"output": (ModelOutput("text_output", None, dims=(1,)),)}, "expected data_type TYPE_STRING, got nothing"),
        (
            {"output": (ModelOutput("score", Datatype.FP32, dims=(1,)),)},
            "output 'score': this model has text_out",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        complete_config(ModelConfig(name="m", **fields))
    assert message in caught.value.message

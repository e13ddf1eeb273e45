"""Whatever a body of TGI's or llama.cpp's says, it is understood or refused by naming what is wrong."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import strategies

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.frontends.llamacpp.request import read_bias, read_prompts
from modelserver.frontends.llamacpp.request import read_request as read_completion
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.tgi.request import read_request as read_generation

NAMES = re.findall(
    r"\w+",
    """
    inputs parameters best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample
    max_new_tokens return_full_text stop truncate watermark details decoder_input_details seed top_n_tokens grammar
    type value schema adapter_id add_special_tokens prompt prompt_string multimodal_data n_predict min_p n_cmpl
    repeat_penalty repeat_last_n dry_multiplier dry_sequence_breakers xtc_probability mirostat dynatemp_range
    top_n_sigma json_schema ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt
    return_tokens samplers timings_per_token response_fields lora stream
    """,
)
VALUES = strategies.recursive(
    strategies.one_of(
        strategies.none(),
        strategies.booleans(),
        strategies.integers(-(2**63), 2**64 - 1),
        strategies.floats(allow_nan=False, allow_infinity=False),
        strategies.sampled_from(["json", "regex", "json_schema", "{", "", "x"]),
    ),
    lambda inner: strategies.one_of(
        strategies.lists(inner, max_size=3),
        strategies.dictionaries(strategies.sampled_from(NAMES), inner, max_size=3),
    ),
    max_leaves=8,
)
BODIES = strategies.dictionaries(strategies.sampled_from(NAMES), VALUES, max_size=6)
MODEL = LanguageModel(
    ModelConfig(
        name="m",
        input=tuple(
            ModelInput(name, Datatype.BYTES, dims=(1,))
            for name in ("text_input", "input_ids", "operation", "sampling_parameters")
        ),
    )
)


def generation(body: dict[str, Any]) -> dict[str, Any]:
    asked = read_generation(Fields({"inputs": "a", "parameters": body}), MODEL, is_streamed=False)
    return asked.sampling


def completion(body: dict[str, Any]) -> dict[str, Any]:
    fields = Fields({"prompt": "a"} | body)
    prompts, is_array = read_prompts(fields, "prompt")
    asked = read_completion(fields, prompts, is_array=is_array)
    return {**asked.sampling, "logit_bias": read_bias(fields)}


@pytest.mark.parametrize("read", [generation, completion])
@hypothesis.given(body=BODIES)
@hypothesis.settings(max_examples=100, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_any_body(read: Any, body: dict[str, Any]) -> None:
    refusal: ParameterError | None = None
    try:
        assert orjson.dumps(read(body))
    except ParameterError as error:
        refusal = error
    if refusal is not None:
        assert refusal.param
        assert refusal.message

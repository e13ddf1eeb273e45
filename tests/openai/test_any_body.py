"""Whatever a body says, it is understood or refused by naming what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import strategies

from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.openai.chat_request import read_chat
from modelserver.frontends.openai.completion_request import read_completion

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
WORDS = """
    messages prompt echo n best_of logprobs top_logprobs prompt_logprobs stream stream_options include_usage
    max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stop_token_ids logit_bias
    allowed_token_ids bad_words response_format json_schema schema structured_outputs json regex choice grammar
    json_object guided_json tools tool_choice parallel_tool_calls functions documents chat_template
    chat_template_kwargs reasoning_effort modalities add_generation_prompt continue_final_message
    add_special_tokens return_token_ids suffix cache_salt priority role content name type function tool_calls
    arguments parameters text reasoning refusal
"""
NAMES = re.findall(r"\w+", WORDS)
SCALARS = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(-(2**63), 2**63 - 1),
    strategies.floats(allow_nan=False, allow_infinity=False),
    strategies.sampled_from(["function", "user", "assistant", "auto", "required", "json_schema", "text", "", "x"]),
)
VALUES = strategies.recursive(
    strategies.one_of(SCALARS, strategies.sampled_from([TOOL, JSON_SCHEMA])),
    lambda inner: strategies.one_of(
        strategies.lists(inner, max_size=3),
        strategies.dictionaries(strategies.sampled_from(NAMES), inner, max_size=3),
    ),
    max_leaves=8,
)
BODIES = strategies.dictionaries(strategies.sampled_from(NAMES), VALUES, max_size=5)


@pytest.mark.parametrize("read", [read_chat, read_completion])
@hypothesis.given(body=BODIES)
@hypothesis.settings(max_examples=100)
def test_any_body(read: Callable[[Fields], Any], body: dict[str, Any]) -> None:
    complete = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"} | body
    try:
        request = read(Fields(complete))
    except ParameterError as error:
        found = error
    else:
        assert orjson.dumps(request.call.sampling)
        return
    assert found.param
    assert found.message

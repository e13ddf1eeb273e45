"""What a request's tensors and parameters say, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.call import Call, read_call
from modelserver_backends.llm.contract import Operation
from modelserver_backends.llm.lora.uses import AdapterUse
from support.contexts import request_of
from support.llm_models import arrays

from modelserver.errors import InvalidArgumentError, ServerError

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def read(parameters: dict[str, Any] | None = None, outputs: tuple[str, ...] | None = None, **inputs: Any) -> Call:
    request = request_of(**arrays(**inputs))
    request.parameters = parameters or {}
    request.outputs = outputs
    return read_call(request)


def test_the_least_is_a_prompt() -> None:
    call = read(text_input="grüße")
    assert (call.operation, call.text, call.is_streamed, call.has_input) == (Operation.GENERATE, "grüße", False, True)
    assert (call.wants, call.priority, call.cache_salt, call.params.max_tokens) == (frozenset(), 0, "", 16)


@pytest.mark.parametrize(
    ("inputs", "has_input"),
    [
        ({"text_input": "a"}, True),
        ({"text_input": "a", "stream": True}, False),
        ({"text_input": "a", "exclude_input_in_output": True}, False),
        ({"text_input": "a", "stream": True, "exclude_input_in_output": True}, False),
        ({"messages": CHAT}, False),
        ({"input_ids": [1]}, False),
        ({"input_ids": [1], "exclude_input_in_output": False}, True),
    ],
)
def test_the_prompt_comes_back_where_triton_sends_it(inputs: dict[str, Any], has_input: bool) -> None:
    assert read(**inputs).has_input is has_input


def test_outputs_are_asked_for_by_flags_and_by_name() -> None:
    assert read(text_input="a", return_finish_reason=True).wants == {"finish_reason"}
    assert read(text_input="a", return_finish_reason=False).wants == frozenset()
    assert read(text_input="a", outputs=("text_output", "token_ids")).wants == {
        "text_output", "token_ids", "choice_token_ids",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "asked", "expected"),
    [
        ({}, {}, (None, None)),
        ({"logprobs": 5, "prompt_logprobs": 3}, {}, (None, None)),
        ({"logprobs": 5}, {"return_logprobs": True}, (5, None)),
        # Without the parameter `logprobs` the output of that name is null, as in Triton's vLLM backend.
        ({}, {"return_logprobs": True, "return_prompt_logprobs": True}, (None, 0)),
        ({}, {"return_token_logprobs": True}, (0, None)),
        ({}, {"return_cumulative_logprob": True}, (0, None)),
    ],
)
def test_log_probabilities_are_computed_where_they_are_wanted(
    given: dict[str, int], asked: dict[str, bool], expected: tuple[int | None, int | None]
) -> None:
    params = read(text_input="a", sampling_parameters=given, **asked).params
    assert (params.logprobs, params.prompt_logprobs) == expected


def test_request_parameters_count_and_the_json_wins() -> None:
    parameters = {"max_tokens": 3, "temperature": "0.5", "x-request-id": "somebody's"}
    call = read(parameters, text_input="a", sampling_parameters={"temperature": 0, "priority": -2, "cache_salt": "s"})
    assert (call.params.max_tokens, call.params.temperature) == (3, 0)
    assert (call.priority, call.cache_salt) == (-2, "s")


def test_the_words_of_tensorrt_llm_are_understood() -> None:
    nothing = read({"bad_words": "", "stop_words": ""}, text_input="a").params
    assert nothing == read(text_input="a").params
    params = read({"bad_words": "bad", "stop_words": ["x", "y"]}, text_input="a").params
    assert (params.bad_words, params.stop) == (("bad",), ("x", "y"))
    assert read({"stop": "s", "stop_words": "t"}, text_input="a").params.stop == ("s",)


def test_the_priority_of_the_protocol_is_the_engines() -> None:
    request = request_of(**arrays(text_input="a"))
    request.priority = 7
    assert read_call(request).priority == 7


def test_empty_parameters_are_none() -> None:
    assert read(text_input="a", sampling_parameters="").params == read(text_input="a").params


def test_a_conversation_is_taken_apart() -> None:
    document = {**CHAT, "tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    chat = read(messages={**document, "add_generation_prompt": False}).chat
    assert chat is not None
    assert (chat.tools, chat.documents, dict(chat.variables)) == (
        [{"type": "function"}],
        None,
        {"enable_thinking": False},
    )
    assert (chat.has_generation_prompt, chat.is_continued) == (False, False)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "'generate' needs one of the inputs text_input, messages, input_ids, got none of them"),
        ({"text_input": "a", "input_ids": [1]}, "got text_input and input_ids"),
        ({"text_input": b"\xff"}, "input 'text_input' is not UTF-8"),
        ({"text_input": "a", "sampling_parameters": "{"}, "input 'sampling_parameters' must be a JSON object"),
        ({"text_input": "a", "sampling_parameters": [1]}, "input 'sampling_parameters' must be a JSON object, got"),
        ({"text_input": "a", "sampling_parameters": {"temprature": 1}}, "did you mean 'temperature'?"),
        (
            {"text_input": "a", "sampling_parameters": {"temperature": -1}},
            "'temperature' must be from 0 to 1000000",
        ),
        ({"text_input": "a", "sampling_parameters": {"top_p": "x"}}, "parameter 'top_p' must be a number"),
        ({"text_input": "a", "sampling_parameters": {"n": 0}}, "parameter 'n' must be from 1 to"),
        ({"text_input": "a", "sampling_parameters": {"priority": 2**40}}, "'priority' must be an integer of 32 bits"),
        ({"text_input": "a", "sampling_parameters": {"cache_salt": 1}}, "'cache_salt' must be a string"),
        ({"text_input": "a", "stream": True, "exclude_input_in_output": False}, "`exclude_input_in_output` = False is"),
        ({"text_input": "a", "operation": "sing"}, "input 'operation': expected one of generate, tokenize"),
        ({"input_ids": [1], "operation": "tokenize"}, "'tokenize' needs one of the inputs text_input, messages, got"),
        ({"text_input": "a", "operation": "detokenize"}, "'detokenize' needs the input 'input_ids', got text_input"),
        ({"text_input": "a", "operation": "embed", "stream": True}, "'stream' cannot be true"),
        ({"messages": "[]"}, "input 'messages' must be a JSON object"),
        ({"messages": {}}, "'messages' must be a list of objects, got null"),
        ({"messages": {"messages": []}}, "expected at least one message"),
        ({"messages": {"messages": "x"}}, "'messages' must be a list of objects"),
        ({"messages": {"messages": [1]}}, "'messages' must be a list of objects"),
        ({"messages": {**CHAT, "tools": {}}}, "'tools' must be a list of objects"),
        ({"messages": {**CHAT, "model": "x"}}, 'unknown key "model"'),
        ({"messages": {**CHAT, "add_generation_prompt": 1}}, "'add_generation_prompt' must be true or false"),
        ({"messages": {**CHAT, "chat_template_kwargs": [1]}}, "'chat_template_kwargs' must be an object"),
    ],
)
def test_what_is_wrong_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(**inputs)
    assert message in caught.value.message


@pytest.mark.parametrize("name", ["max_token", "temprature", "stop_token_id"])
def test_a_request_parameter_that_is_nearly_right_is_an_error(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean"):
        read({name: 1}, text_input="a")


def test_adapters_by_each_of_their_names() -> None:
    for sampling, uses in (
        ({"lora_name": "x"}, (AdapterUse("x"),)),
        ({"lora_request": {"lora_name": "x", "lora_int_id": 1}}, (AdapterUse("x"),)),
        ({"lora": [{"name": "x", "scale": 0.5}, {"name": "y"}]}, (AdapterUse("x", 0.5), AdapterUse("y"))),
    ):
        assert read(text_input="a", sampling_parameters=sampling).adapters == uses
    assert read({"lora_name": "x"}, text_input="a", operation="embed").adapters == (AdapterUse("x"),)
    with pytest.raises(InvalidArgumentError, match="'lora' must be a list of at most 16 objects"):
        read(text_input="a", sampling_parameters={"lora": "x"})


def test_other_operations_take_no_parameters() -> None:
    with pytest.raises(ServerError, match="must be a JSON object"):
        read(text_input="a", sampling_parameters="[")
    assert read(text_input="a", sampling_parameters="[", operation="embed").operation is Operation.EMBED


def test_long_json_is_read_as_short_json_within_its_bounds() -> None:
    chat = {"messages": [{"role": "user", "content": "größer " * 10}] * 1000}
    call = read(messages=chat)
    assert call.chat is not None
    assert call.chat.messages == chat["messages"]
    with pytest.raises(ServerError, match=r"may have \d+ values, at most 524288 are allowed"):
        read(messages={"messages": [0] * 600_000})

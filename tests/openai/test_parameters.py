"""Every parameter: what the model gets of it, and a precise refusal of what is wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.mock_llm import say, user

REPORT = say(report=True)
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def body_of(path: str) -> dict[str, Any]:
    model = {"model": "mock"}
    if path in (CHAT, "/tokenize"):
        return {**model, "messages": user(REPORT)}
    if path == "/detokenize":
        return {**model, "tokens": [1]}
    return {**model, "input" if path == EMBEDDINGS else "prompt": REPORT}


def report(http: httpx.Client, path: str, **parameters: Any) -> dict[str, Any]:
    """What the model got of a request."""
    answer = http.post(path, json=body_of(path) | parameters)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    found: dict[str, Any] = json.loads(text)
    return found


BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
    ),
    ({"temperature": None, "seed": 7, "user": "u", "unknown": 1, "store": True}, {"seed": 7}),
    (
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1.5},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1.5},
    ),
    ({"stop": "xyz", "min_tokens": 2}, {"stop": ["xyz"], "min_tokens": 2}),
    (
        {"stop": ["xyz", "zyx"], "include_stop_str_in_output": True},
        {"stop": ["xyz", "zyx"], "include_stop_str_in_output": True},
    ),
    ({"stop": []}, {}),
    ({"stop_token_ids": [1, 2], "ignore_eos": True}, {"stop_token_ids": [1, 2], "ignore_eos": True}),
    ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
    ({"allowed_token_ids": [4], "bad_words": ["b"]}, {"allowed_token_ids": [4], "bad_words": ["b"]}),
    (
        {"skip_special_tokens": False, "priority": -3, "cache_salt": "s"},
        {"skip_special_tokens": False, "priority": -3, "cache_salt": "s"},
    ),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    ({"response_format": JSON_SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    ),
    (
        {"response_format": JSON_SCHEMA, "structured_outputs": {"disable_any_whitespace": True}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    ),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_grammar": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
    ({"grammar": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
    ({"grammar": {"type": "json", "value": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
    ({"grammar": {"type": "regex", "value": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ({"ebnf": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
    ({"grammar": "", "json_schema": None, "mirostat": 0, "typical_p": 1.0}, {}),
    ({"prediction": {"type": "content", "content": "a b"}}, {}),
    ({"xtc_probability": 0, "dry_multiplier": 0.0, "dynatemp_range": 0, "top_n_sigma": -1.0}, {}),
    *(
        (given, given)
        for given in (
            {"typical_p": 0.5, "top_n_sigma": 1.5},
            {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
            {"xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.25, "dynatemp_exponent": 2.0},
            {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64},
            {"dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"]},
        )
    ),
]


@pytest.mark.parametrize(("given", "expected"), BOTH)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_model_gets_what_the_client_says(
    http: httpx.Client, path: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = report(http, path, max_tokens=500, **given)["sampling_parameters"]
    assert found == {"max_tokens": 500, **expected}


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        (CHAT, {}, {"max_tokens": None}),
        (CHAT, {"max_tokens": 70, "max_completion_tokens": 90}, {"max_tokens": 90}),
        (CHAT, {"logprobs": True, "max_tokens": 99}, {"logprobs": 0, "max_tokens": 99}),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 99}, {"logprobs": 2, "max_tokens": 99}),
        (CHAT, {"prompt_logprobs": 1, "max_tokens": 99}, {"prompt_logprobs": 1, "max_tokens": 99}),
        (CHAT, {"n": 2, "max_tokens": 99}, {"n": 2, "max_tokens": 99}),
        (COMPLETIONS, {"logprobs": 0, "max_tokens": 99}, {"logprobs": 0, "max_tokens": 99}),
        (COMPLETIONS, {"n": 1, "best_of": 2, "max_tokens": 99}, {"n": 2, "max_tokens": 99}),
    ],
)
def test_parameters_of_one_route(
    http: httpx.Client, path: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert report(http, path, **given)["sampling_parameters"] == expected


def test_a_completion_has_16_tokens_unless_it_says_more(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"model": "mock", "prompt": "a " * 20}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


WRONG_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": 1}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"allowed_token_ids": [2**31]}, "allowed_token_ids[0]"),
    ({"bad_words": [1]}, "bad_words[0]"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}},
        "response_format.json_schema.schema.type",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"prediction": "a b"}, "prediction"),
    ({"grammar": 5}, "grammar"),
    ({"grammar": {"value": "a"}}, "grammar.type"),
    ({"grammar": {"type": "xml", "value": "a"}}, "grammar.type"),
    ({"grammar": {"type": "regex", "value": ""}}, "grammar.value"),
    ({"grammar": "root ::= x", "json_schema": SCHEMA}, "grammar"),
    ({"json_schema": []}, "json_schema"),
    ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema"),
    ({"guided_whitespace_pattern": "[ ]?"}, "guided_whitespace_pattern"),
    ({"mirostat": 3}, "mirostat"),
    ({"typical_p": 0}, "typical_p"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"n_predict": 5}, "n_predict"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"request_id": 5}, "request_id"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"metadata": "a"}, "metadata"),
    ({"store": "yes"}, "store"),
    ({"prompt_cache_key": []}, "prompt_cache_key"),
    ({"moderation": {"model": "m"}}, "moderation"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "r" * 65, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "king"}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "a", "name": 1}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": user("a") * 4097}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tools": [TOOL]}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": JSON_SCHEMA}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "tool_choice"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"functions": [{}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"function_call": {"name": "g"}}, "function_call.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "no", "tools": [TOOL]}}, "tool_choice.mode"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"documents": [1]}, "documents[0]"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [[1, -1]]}, "prompt[0][1]"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ({"prompt": [1, 2**31]}, "prompt[1]"),
    ({"suffix": "end", "model": "plain"}, "suffix"),
    ({"echo": 1}, "echo"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 999}, "best_of"),
]
WRONG_OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (EMBEDDINGS, {"input": None}, "input"),
    (EMBEDDINGS, {"input": {}}, "input"),
    (EMBEDDINGS, {"input": ["a", [1]]}, "input[1]"),
    (EMBEDDINGS, {"messages": user("a")}, "input"),
    (EMBEDDINGS, {"embed_dtype": "bfloat16"}, "embed_dtype"),
    (EMBEDDINGS, {"endianness": "big"}, "endianness"),
    (EMBEDDINGS, {"user": 5}, "user"),
    (EMBEDDINGS, {"add_special_tokens": "x"}, "add_special_tokens"),
    (EMBEDDINGS, {"dimensions": "many"}, "dimensions"),
    (EMBEDDINGS, {"dimensions": 0}, "dimensions"),
    (EMBEDDINGS, {"encoding_format": "hex"}, "encoding_format"),
    (EMBEDDINGS, {"model": "plain"}, "model"),
    (EMBEDDINGS, {"model": "encoder", "dimensions": 2}, "dimensions"),
    (COMPLETIONS, {"model": "encoder"}, "model"),
    ("/tokenize", {"messages": None}, "prompt"),
    ("/tokenize", {"messages": None, "prompt": 1}, "prompt"),
    ("/tokenize", {"prompt": "a"}, "prompt"),
    ("/tokenize", {"messages": [1]}, "messages[0]"),
    ("/tokenize", {"chat_template": "{{ x }}"}, "chat_template"),
    ("/tokenize", {"add_generation_prompt": 1}, "add_generation_prompt"),
    ("/tokenize", {"return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"add_special_tokens": 1}, "add_special_tokens"),
    ("/detokenize", {"tokens": 5}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ("/detokenize", {"tokens": None}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]
WRONG = [
    *((CHAT, given, param) for given, param in [*WRONG_SAMPLING, *WRONG_CHAT]),
    *((COMPLETIONS, given, param) for given, param in [*WRONG_SAMPLING, *WRONG_COMPLETIONS]),
    *WRONG_OTHERS,
]


@pytest.mark.parametrize(("path", "given", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(http: httpx.Client, path: str, given: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body_of(path) | given)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ("parameter 'stop' must be x", "stop", None),
        ("unknown parameter 'magic'", "magic", None),
        ("input 'text_input' is not UTF-8", "messages", None),
        ("messages[3] must be an object", "messages[3]", None),
        ("the prompt has 900 tokens; there is room for 3", "messages", "context_length_exceeded"),
        ("the prompt is empty", "messages", None),
        ("no idea", None, None),
    ],
)
def test_what_the_model_refuses_is_named_where_it_says_so(
    http: httpx.Client, said: str, param: str | None, code: str | None
) -> None:
    answer = http.post(CHAT, json={"model": "mock", "messages": user(say(refuse=said))})
    assert answer.status_code == 400
    error = {"message": said, "type": "invalid_request_error", "param": param, "code": code}
    assert answer.json() == {"error": error}

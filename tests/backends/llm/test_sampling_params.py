"""Every parameter's defaults, types, ranges and aliases; an error names the parameter and what it may be."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from modelserver_backends.llm.sampling_params import CONVERTERS, MAX_N, SamplingParams

from modelserver.backend import InvalidArgumentError


def message(values: dict[str, Any]) -> str:
    with pytest.raises(InvalidArgumentError) as raised:
        SamplingParams.from_json(values)
    return raised.value.message


def test_nothing_given_is_the_default() -> None:
    assert SamplingParams.from_json({}) == SamplingParams()
    assert SamplingParams().max_tokens == 16


def test_every_field_is_checked() -> None:
    assert CONVERTERS.keys() == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("n", 3, 3),
        ("n", "3", 3),
        ("n", 3.0, 3),
        ("n", MAX_N, MAX_N),
        ("temperature", 0, 0.0),
        ("temperature", "0.5", 0.5),
        ("temperature", 100, 100.0),
        ("top_k", -1, -1),
        ("top_k", "40", 40),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("repetition_penalty", 1.3, 1.3),
        ("frequency_penalty", -2, -2.0),
        ("presence_penalty", 2, 2.0),
        ("logit_bias", {"5": 1, "7": "-100"}, {5: 1.0, 7: -100.0}),
        ("logit_bias", '{"5": 1}', {5: 1.0}),
        ("logit_bias", {}, {}),
        ("allowed_token_ids", [1, 2], (1, 2)),
        ("allowed_token_ids", None, None),
        ("bad_words", "bad", ("bad",)),
        ("bad_words", ["a", "b"], ("a", "b")),
        ("seed", -1, -1),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", None, None),
        ("max_tokens", 1, 1),
        ("max_tokens", "128", 128),
        ("max_tokens", None, None),
        ("min_tokens", 16, 16),
        ("stop", "\n", ("\n",)),
        ("stop", ["a", "bc"], ("a", "bc")),
        ("stop", [], ()),
        ("stop", None, ()),
        ("stop_token_ids", [3], (3,)),
        ("stop_token_ids", "[3, 4]", (3, 4)),
        ("include_stop_str_in_output", True, True),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("logprobs", 0, 0),
        ("logprobs", None, None),
        ("prompt_logprobs", 5, 5),
        ("skip_special_tokens", False, False),
        ("temperature", None, 1.0),
    ],
)
def test_what_is_taken(name: str, given: Any, taken: Any) -> None:
    value = getattr(SamplingParams.from_json({name: given}), name)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("n", 0, f"from 1 to {MAX_N}, got 0"),
        ("n", MAX_N + 1, f"from 1 to {MAX_N}"),
        ("n", True, "an integer, got true"),
        ("n", 1.5, "an integer, got 1.5"),
        ("n", "x", 'an integer, got "x"'),
        ("n", [1], "an integer, got [1]"),
        ("n", math.inf, "an integer"),
        ("n", math.nan, "an integer"),
        ("temperature", -0.1, "from 0 to 1000000, got -0.1"),
        ("temperature", 1e39, "from 0 to 1000000"),
        ("temperature", math.nan, "a finite number"),
        ("temperature", "inf", "a finite number"),
        ("temperature", "hot", 'a number, got "hot"'),
        ("temperature", False, "a number, got false"),
        ("temperature", 10**400, "a number"),
        ("top_k", -2, "from 1 to 2147483647, or 0 or -1 for all tokens, got -2"),
        ("top_k", "1" * 400, "from 1 to 2147483647"),
        ("top_p", 0, "above 0 and at most 1, got 0"),
        ("top_p", 1.01, "above 0 and at most 1, got 1.01"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("repetition_penalty", 0, "from 0.001 to 1000, got 0"),
        ("repetition_penalty", 1e-300, "from 0.001 to 1000"),
        ("repetition_penalty", 1001, "from 0.001 to 1000"),
        ("frequency_penalty", 2.01, "from -2 to 2"),
        ("presence_penalty", -2.01, "from -2 to 2"),
        ("logit_bias", [1], "an object of token ids and numbers"),
        ("logit_bias", {"a": 1}, "an integer"),
        ("logit_bias", {"5": 101}, "numbers from -100 to 100"),
        ("logit_bias", {"-5": 1}, "numbers from -100 to 100"),
        ("logit_bias", "{", "JSON"),
        ("allowed_token_ids", [], "a list of at least one token id"),
        ("allowed_token_ids", [-1], "not negative"),
        ("allowed_token_ids", 5, "a list of token ids"),
        ("bad_words", [""], "without empty strings"),
        ("bad_words", [1], "a string or a list of strings"),
        ("seed", 2**63, "an integer of 64 bits"),
        ("max_tokens", 0, "at least 1, got 0"),
        ("max_tokens", "1_0", 'an integer, got "1_0"'),
        ("max_tokens", "\u0663", "an integer"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "at most max_tokens (16), got 17"),
        ("stop", "", "without empty strings"),
        ("stop", [1], "a string or a list of strings"),
        ("stop", {"a": 1}, "a string or a list of strings"),
        ("stop_token_ids", ["x"], "an integer"),
        ("stop_token_ids", [-3], "not negative"),
        ("include_stop_str_in_output", 1, "true or false, got 1"),
        ("ignore_eos", "yes", "true or false"),
        ("logprobs", -1, "at least 0"),
        ("prompt_logprobs", True, "an integer"),
        ("skip_special_tokens", [], "true or false"),
        ("structured_outputs", 5, "an object with one of json, json_object, regex, choice, grammar"),
        ("structured_outputs", {}, "exactly one of"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "exactly one of"),
        ("structured_outputs", {"json_object": False}, "exactly one of"),
    ],
)
def test_what_is_refused(name: str, given: Any, expected: str) -> None:
    said = message({name: given})
    assert f"parameter '{name}" in said
    assert expected in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("temprature", "unknown parameter 'temprature'; did you mean 'temperature'?"),
        ("max_token", "did you mean 'max_tokens'?"),
        ("guided_jsn", "did you mean 'guided_json'?"),
        ("xyz", "unknown parameter 'xyz'; there are allowed_token_ids, bad_words"),
    ],
)
def test_unknown_names(given: str, expected: str) -> None:
    assert expected in message({given: 1})


@pytest.mark.parametrize(
    "neutral",
    [
        {"best_of": 1},
        {"best_of": "1"},
        {"best_of": None},
        {"use_beam_search": False},
        {"use_beam_search": "false"},
        {"length_penalty": 1.0},
        {"detokenize": True},
        {"truncate_prompt_tokens": None},
    ],
)
def test_what_asks_for_nothing_may_be_given(neutral: dict[str, Any]) -> None:
    assert SamplingParams.from_json(neutral) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"best_of": 2}, "parameter 'best_of' must be 1 or absent, because this server does not support it, got 2"),
        ({"use_beam_search": True}, "parameter 'use_beam_search' must be false or absent"),
        ({"truncate_prompt_tokens": 5}, "parameter 'truncate_prompt_tokens' must be -1 or absent"),
        ({"best_of": "two"}, "parameter 'best_of' must be a number"),
    ],
)
def test_what_is_not_supported(given: dict[str, Any], expected: str) -> None:
    assert expected in message(given)


def test_a_long_value_is_cut_in_an_error() -> None:
    assert len(message({"n": "x" * 10_000})) < 200


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json": {"type": "object"}}),
        ({"structured_outputs": '{"regex": "a+"}'}, {"regex": "a+"}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "disable_fallback": False}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}}, {"choice": ["a"]}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"guided_json": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_decoding": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"guided_decoding": '{"choice": ["a"]}'}, {"choice": ["a"]}),
        ({"guided_json": None}, None),
        ({"structured_outputs": None}, None),
    ],
)
def test_structured_outputs_have_one_form(given: dict[str, Any], taken: Any) -> None:
    assert SamplingParams.from_json(given).structured_outputs == taken


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"guided_json": "{"}, "'structured_outputs.json' must be JSON"),
        ({"guided_json": [1]}, "'structured_outputs.json' must be a JSON schema"),
        ({"guided_choice": []}, "'structured_outputs.choice' must be a list of at least one string"),
        ({"guided_choice": [1]}, "'structured_outputs.choice'"),
        ({"guided_regex": ""}, "'structured_outputs.regex' must be a string that is not empty"),
        ({"guided_regex": 5}, "'structured_outputs.regex' must be a string"),
        ({"guided_regex": "a", "guided_json": {}}, "'guided_regex' must be absent when 'guided_json' is given"),
        ({"structured_outputs": {"json": {}}, "guided_json": {}}, "must be absent when 'structured_outputs' is given"),
        ({"structured_outputs": {"regexp": "a"}}, "did you mean 'structured_outputs.regex'?"),
    ],
)
def test_bad_structured_outputs(given: dict[str, Any], expected: str) -> None:
    assert expected in message(given)


def test_python_callers_are_checked_too() -> None:
    assert SamplingParams(stop=["a"], temperature=1).stop == ("a",)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="'top_p' must be above 0"):
        SamplingParams(top_p=0)


def test_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy

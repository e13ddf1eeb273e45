"""`/completion` and `/infill` in the shapes of llama.cpp's server: whole, streamed, and what the model is asked."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.events import events_of
from support.mock_llm import say


def complete(http: httpx.Client, prompt: Any, **more: Any) -> Any:
    answer = http.post("/completion", json={"prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def sampling(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The sampling parameters that reach the model."""
    found: dict[str, Any] = json.loads(complete(http, say(report=True), **more)["content"])["sampling_parameters"]
    return found


def test_curl_need_not_say_that_a_body_is_json_and_pages_of_other_origins_must(http: httpx.Client) -> None:
    body, kind = json.dumps({"prompt": "one"}), {"Content-Type": "application/x-www-form-urlencoded"}
    assert http.post("/completion", content=body, headers=kind).status_code == 200
    assert http.post("/completion", content=body, headers=kind | {"Origin": "http://elsewhere"}).status_code == 400


def test_an_answer_is_one_document(http: httpx.Client) -> None:
    answer = complete(http, "one two three", n_predict=2, temperature=0.5)
    assert (answer["content"], answer["stop"], answer["stop_type"], answer["model"]) == (
        "one two",
        True,
        "limit",
        "mock",
    )
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (2, 3, 5)
    assert (answer["prompt"], answer["truncated"], answer["has_new_line"]) == ("one two three", False, False)
    assert answer["generation_settings"] == {"n_predict": 2, "temperature": 0.5}
    timings = answer["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (1, 2, 2)
    assert timings["prompt_ms"] >= 0
    assert answer["tokens"] == []


def test_a_stream_ends_with_a_document_without_text(http: httpx.Client) -> None:
    answer = http.post("/completions", json={"prompt": "one two", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in answer.text
    *parts, last = events_of(answer.text)
    assert [part["content"] for part in parts] == ["one", " two"]
    assert [part["tokens_predicted"] for part in parts] == [1, 2]
    assert all(len(part["tokens"]) == 1 and part["stop"] is False for part in parts)
    assert (last["content"], last["stop"], last["stop_type"], last["tokens_predicted"]) == ("", True, "eos", 2)
    assert last["timings"]["predicted_n"] == 2


def test_a_text_ends_for_a_reason(http: httpx.Client) -> None:
    stopped = complete(http, "one two three", stop=["two"])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "two")
    ended = complete(http, "one")
    assert (ended["stop_type"], ended["stopping_word"]) == ("eos", "")
    lines = complete(http, say(text="one\ntwo"))
    assert lines["has_new_line"]


def test_a_prompt_may_only_be_read(http: httpx.Client) -> None:
    answer = complete(http, "one two", n_predict=0)
    assert (answer["content"], answer["tokens_predicted"], answer["tokens_evaluated"]) == ("", 0, 2)


def test_tokens_and_probabilities_are_told(http: httpx.Client) -> None:
    answer = complete(http, "one two", n_probs=2, return_tokens=True)
    assert len(answer["tokens"]) == 2
    first = answer["completion_probabilities"][0]
    assert (first["token"], first["logprob"], first["bytes"], first["id"]) == (
        "one",
        -0.5,
        list(b"one"),
        answer["tokens"][0],
    )
    assert [top["token"] for top in first["top_logprobs"]] == ["one", " other0"]
    stream = events_of(http.post("/completion", json={"prompt": "one two", "n_probs": 1, "stream": True}).text)
    assert stream[0]["completion_probabilities"][0]["token"] == "one"


def test_timings_may_come_with_each_token(http: httpx.Client) -> None:
    body = {"prompt": "one two", "stream": True, "timings_per_token": True}
    assert events_of(http.post("/completion", json=body).text)[0]["timings"]["predicted_n"] == 1


def test_an_answer_may_be_cut_to_some_members(http: httpx.Client) -> None:
    answer = complete(http, "one", response_fields=["content", "timings/predicted_n", "nothing"])
    assert answer == {"content": "one", "predicted_n": 1}


def test_prompts_are_texts_tokens_or_both(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": "one two"}).json()["tokens"]
    assert complete(http, ids)["content"] == "one two"
    assert complete(http, ids)["prompt"] == "one two"
    assert complete(http, [*ids, " three"])["content"] == "one two three"
    assert complete(http, {"prompt_string": "one"})["content"] == "one"
    several = complete(http, ["one", ids, [ids[0], " four"]])
    assert [(each["index"], each["content"]) for each in several] == [(0, "one"), (1, "one two"), (2, "one four")]


def test_several_texts_of_one_prompt_are_an_array(http: httpx.Client) -> None:
    answers = complete(http, "one two", n_cmpl=2)
    assert [(each["index"], each["content"]) for each in answers] == [(0, "one two"), (1, "1: one two")]
    events = events_of(http.post("/completion", json={"prompt": "one", "n_cmpl": 2, "stream": True}).text)
    assert {event["index"] for event in events if event["stop"]} == {0, 1}


def test_parameters_reach_the_model_by_its_names(http: httpx.Client) -> None:
    same = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 32,
        "dry_sequence_breakers": ["\n"],
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "dynatemp_range": 0.25,
        "dynatemp_exponent": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
    }
    found = sampling(http, **same, repeat_penalty=1.2, n_predict=99, stop=["zz", ""], ignore_eos=True)
    assert found == {**same, "repetition_penalty": 1.2, "max_tokens": 99, "stop": ["zz"], "ignore_eos": True}


def test_values_that_turn_samplers_off_reach_no_model(http: httpx.Client) -> None:
    off = {
        "seed": -1,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "dynatemp_range": 0.0,
        "typical_p": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "mirostat": 0,
        "repeat_penalty": 1.3,
        "repeat_last_n": 0,
    }
    assert sampling(http, **off, n_predict=-1) == {"max_tokens": None}
    assert sampling(http, temperature=-1, top_k=0, n_predict=99) == {"max_tokens": 99, "temperature": 0.0, "top_k": -1}


def test_what_concerns_only_the_server_has_no_effect(http: httpx.Client) -> None:
    given = {
        "id_slot": 3,
        "cache_prompt": True,
        "n_keep": 4,
        "n_discard": 0,
        "repeat_last_n": 64,
        "return_progress": True,
    }
    assert sampling(http, **given, n_predict=99) == {"max_tokens": 99}


def test_texts_may_be_constrained(http: httpx.Client) -> None:
    grammar = 'root ::= "yes" | "no"'
    assert sampling(http, grammar=grammar)["structured_outputs"] == {"grammar": grammar}
    assert sampling(http, json_schema={"type": "object"})["structured_outputs"] == {"json": {"type": "object"}}


def test_biases_are_for_tokens_and_texts(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": "one two"}).json()["tokens"]
    found = sampling(http, logit_bias=[[ids[0], 2.5], [" two", False]])["logit_bias"]
    assert found == {str(ids[0]): 2.5, str(ids[1]): -100.0}
    assert sampling(http, logit_bias={"one": -1})["logit_bias"] == {str(ids[0]): -1.0}


def test_the_middle_of_a_text_is_filled_in(http: httpx.Client) -> None:
    body = {"input_prefix": "one", "prompt": " two", "input_suffix": " three"}
    answer = http.post("/infill", json=body).json()
    assert answer["content"] == "<|fim_prefix|>one two<|fim_suffix|> three<|fim_middle|>"
    body["input_extra"] = [{"filename": "a.py", "text": "zero"}]  # type: ignore[assignment]  # as it comes
    assert http.post("/infill", json=body).json()["content"].startswith("a.py\nzero\n\n<|fim_prefix|>one")


def test_a_request_names_its_model_where_there_are_several(shared: httpx.Client) -> None:
    assert shared.post("/completion", json={"prompt": "one", "model": "other"}).json()["model"] == "other"
    refused = shared.post("/completion", json={"prompt": "one"})
    assert refused.status_code == 400
    assert "must be one of mock, other" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "'prompt' is missing"),
        ({"prompt": 7}, "'prompt' must be a text"),
        ({"prompt": []}, "'prompt' must be an array that is not empty"),
        ({"prompt": [[1, True]]}, "'prompt[0]' must be"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "'prompt.multimodal_data[0]'"),
        ({"prompt": "a", "samplers": ["top_k"]}, "'samplers' is not supported"),
        ({"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "'lora' has the id 0, and the model has 0 adapters"),
        ({"prompt": "a", "t_max_predict_ms": 5}, "'t_max_predict_ms' is not supported"),
        ({"prompt": "a", "post_sampling_probs": True}, "'post_sampling_probs' is not supported"),
        ({"prompt": "a", "grammar": "x", "json_schema": {}}, 'Either "json_schema" or "grammar"'),
        ({"prompt": "a", "json_schema": 3}, "'json_schema' must be"),
        ({"prompt": "a", "temperature": "hot"}, "'temperature' must be a number"),
        ({"prompt": "a", "logit_bias": [[1]]}, "'logit_bias' must be"),
        ({"prompt": "a", "id_slot": "x"}, "'id_slot' must be an integer"),
    ],
)
def test_wrong_requests_are_refused_in_words(http: httpx.Client, body: dict[str, Any], sentence: str) -> None:
    answer = http.post("/completion", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert error["message"].startswith(sentence)


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(http: httpx.Client) -> None:
    answer = http.post("/completion", json={"prompt": " ".join(["word"] * 600)})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)


def test_failures_of_the_model_are_told_before_and_within_a_stream(http: httpx.Client) -> None:
    answer = http.post("/completion", json={"prompt": say(text="one two", error=0)})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    body = {"prompt": say(text="one two", error=1), "stream": True}
    assert events_of(http.post("/completion", json=body).text)[-1]["error"]["code"] == 500

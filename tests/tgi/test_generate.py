"""TGI's generations by its own clients: whole and streamed, details, and what the model is asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from support.events import events_of
from support.mock_llm import say
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError


def sampling(http: httpx.Client, **parameters: Any) -> dict[str, Any]:
    """The sampling parameters that reach the model."""
    body = {"inputs": say(report=True), "parameters": parameters}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.json()["generated_text"])["sampling_parameters"]
    return found


def test_an_answer_has_the_text_and_its_details(client: Client) -> None:
    answer = client.generate("one two three", max_new_tokens=2, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text == "one two"
    details = answer.details
    assert (details.finish_reason.value, details.generated_tokens) == ("length", 2)
    assert [token.text for token in details.prefill] == ["one", " two", " three"]
    assert [token.logprob for token in details.prefill] == [None, -1.5, -2.5]
    assert [(token.text, token.logprob, token.special) for token in details.tokens] == [
        ("one", -0.5, False),
        (" two", -1.5, False),
    ]
    assert details.top_tokens is not None
    assert [[token.text for token in tokens] for tokens in details.top_tokens] == [
        ["one", " other0"],
        [" two", " other0"],
    ]


def test_a_stream_is_a_token_each_and_ends_with_the_text(client: Client) -> None:
    events = list(client.generate_stream("one two three", max_new_tokens=2, top_n_tokens=1))
    assert [event.token.text for event in events] == ["one", " two"]
    assert events[0].token.id != events[1].token.id
    assert events[0].top_tokens is not None
    assert [event.generated_text for event in events] == [None, "one two"]
    assert events[0].details is None
    assert events[1].details is not None
    assert (events[1].details.finish_reason.value, events[1].details.generated_tokens) == ("length", 2)


def test_the_client_of_the_hub_generates_whole_and_streamed(hub: InferenceClient) -> None:
    assert hub.text_generation("one two", return_full_text=False) == "one two"
    assert "".join(hub.text_generation("one two", stream=True)) == "one two"
    whole = hub.text_generation("one two", details=True, return_full_text=False)
    assert whole.details is not None
    assert (whole.details.finish_reason, whole.details.generated_tokens) == ("eos_token", 2)
    *_, last = hub.text_generation("one two", details=True, stream=True, return_full_text=False)
    assert last.details is not None
    assert (last.generated_text, last.details.input_length) == ("one two", 2)


def test_the_asynchronous_client_generates(url: str) -> None:
    async def ask() -> tuple[str, list[str]]:
        client = AsyncClient(url)
        whole = await client.generate("one two")
        return whole.generated_text, [event.token.text async for event in client.generate_stream("one two")]

    assert asyncio.run(ask()) == ("one two", ["one", " two"])


def test_conversations_go_to_openais_route(hub: InferenceClient, client: Client) -> None:
    messages = [{"role": "user", "content": "one two"}]
    assert hub.chat_completion(messages).choices[0].message.content == "one two"
    assert client.chat(messages).choices[0].message.content == "one two"  # type: ignore[arg-type]  # as its README


def test_whole_answers_have_headers(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"inputs": "one two"})
    headers = answer.headers
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"], headers["x-compute-characters"]) == (
        "2",
        "2",
        "7",
    )
    assert float(headers["x-compute-time"]) > 0
    for name in ("total", "validation", "inference"):
        assert headers[f"x-{name}-time"].isdigit()
    assert int(headers["x-time-per-token"]) <= int(headers["x-inference-time"]) <= int(headers["x-total-time"])
    stream = http.post("/generate_stream", json={"inputs": "one two"})
    assert stream.headers["x-compute-characters"] == "7"
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_details_are_left_out_unless_they_are_asked_for(http: httpx.Client) -> None:
    assert http.post("/generate", json={"inputs": "one"}).json() == {"generated_text": "one"}
    last = events_of(http.post("/generate_stream", json={"inputs": "one"}).text)[-1]
    assert (last["index"], last["generated_text"], last["details"]) == (1, "one", None)


def test_the_older_form_is_an_array_with_the_prompt(http: httpx.Client) -> None:
    assert http.post("/", json={"inputs": "one"}).json() == [{"generated_text": "oneone"}]
    short = {"inputs": "one", "parameters": {"return_full_text": False}}
    assert http.post("/", json=short).json() == [{"generated_text": "one"}]
    events = events_of(http.post("/", json={"inputs": "one two", "stream": True}).text)
    assert [event["token"]["text"] for event in events] == ["one", " two"]
    assert events[-1]["generated_text"] == "one twoone two"


def test_the_best_of_several_comes_first(http: httpx.Client) -> None:
    asked = {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 3}
    answer = http.post("/generate", json={"inputs": "one two three", "parameters": asked}).json()
    # The mock's measure is the length of a text.
    assert len(answer["generated_text"]) >= max(
        len(each["generated_text"]) for each in answer["details"]["best_of_sequences"]
    )
    assert len(answer["details"]["best_of_sequences"]) == 2
    assert answer["details"]["best_of_sequences"][0]["finish_reason"] in ("length", "eos_token")


def test_a_text_ends_for_a_reason(client: Client) -> None:
    assert client.generate("one two", max_new_tokens=1).details.finish_reason == "length"
    assert client.generate("one two", stop_sequences=["two"]).details.finish_reason == "stop_sequence"
    ended = client.generate("one two").details
    assert ended.finish_reason == "eos_token"
    assert not ended.tokens[-1].special


def test_the_mark_of_the_end_is_special(client: Client) -> None:
    said = say(text="one two", mark="</s>")
    tokens = client.generate(said).details.tokens
    assert [(token.text, token.special) for token in tokens] == [("one", False), (" two", False), ("</s>", True)]
    events = list(client.generate_stream(said))
    assert [(event.token.text, event.token.special) for event in events] == [
        ("one", False),
        (" two", False),
        ("</s>", True),
    ]
    assert events[-1].generated_text == "one two"


def test_the_most_probable_token_is_taken_unless_chance_is_asked_for(http: httpx.Client) -> None:
    assert sampling(http) == {"temperature": 0.0, "max_tokens": 100}
    drawn = sampling(http, do_sample=True)
    assert drawn.keys() == {"seed", "max_tokens"}
    assert "temperature" not in sampling(http, top_k=3)


def test_parameters_reach_the_model_by_its_names(http: httpx.Client) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "typical_p": 0.8,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.5,
        "seed": 2**64 - 1,
    }
    found = sampling(http, **given, max_new_tokens=99, stop=["zz", ""])
    assert found == {
        **given,
        "seed": -1,
        "max_tokens": 99,
        "stop": ["zz"],
        "include_stop_str_in_output": True,
    }


@pytest.mark.parametrize(
    ("grammar", "structure"),
    [
        ({"type": "json", "value": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"type": "json", "value": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"type": "json_schema", "value": {"name": "x", "schema": {"type": "array"}}}, {"json": {"type": "array"}}),
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
    ],
)
def test_grammars_constrain_the_text(http: httpx.Client, grammar: dict[str, Any], structure: dict[str, Any]) -> None:
    assert sampling(http, grammar=grammar)["structured_outputs"] == structure


def test_the_seed_of_a_sampled_text_is_told(http: httpx.Client) -> None:
    def seed(**parameters: Any) -> int | None:
        body = {"inputs": "one", "parameters": {"details": True, **parameters}}
        found: int | None = http.post("/generate", json=body).json()["details"]["seed"]
        return found

    assert seed() is None
    assert seed(do_sample=True, seed=7) == 7
    assert isinstance(seed(do_sample=True), int)


def test_the_end_of_a_prompt_is_kept(http: httpx.Client) -> None:
    body = {"inputs": "one two three", "parameters": {"truncate": 2, "decoder_input_details": True}}
    answer = http.post("/generate", json=body).json()
    assert answer["generated_text"] == " two three"
    assert [token["text"] for token in answer["details"]["prefill"]] == [" two", " three"]


def test_special_tokens_are_added_unless_the_request_says_otherwise(http: httpx.Client) -> None:
    body = {"inputs": say(report=True), "add_special_tokens": False}
    assert json.loads(http.post("/generate", json=body).json()["generated_text"])["add_special_tokens"] is False


def test_text_that_comes_in_other_pieces_than_tokens_is_complete(http: httpx.Client) -> None:
    answer = http.post("/generate_stream", json={"inputs": say(text="día único", cut=1)})
    assert "".join(event["token"]["text"] for event in events_of(answer.text)) == "día único"


def test_a_model_that_tells_no_tokens_streams_its_text(plain_url: str) -> None:
    with httpx.Client(base_url=plain_url, timeout=20) as http:
        answer = http.post("/generate_stream?model=plain", json={"inputs": "one two"})
        events = events_of(answer.text)
        assert "".join(event["token"]["text"] for event in events) == "one two"
        assert events[-1]["generated_text"] == "one two"
        refused = http.post("/generate?model=plain", json={"inputs": "one", "parameters": {"details": True}})
        assert refused.status_code == 422
        assert "return_logprobs" in refused.json()["error"]


def test_a_request_names_its_model_where_there_are_several(plain_url: str) -> None:
    assert Client(f"{plain_url}/?model=mock").generate("one").generated_text == "one"
    answer = httpx.post(f"{plain_url}/generate", json={"inputs": "one", "model": "plain"})
    assert answer.json() == {"generated_text": "one"}
    with pytest.raises(ValidationError, match="must be one of mock, plain"):
        Client(plain_url).generate("one")

"""Responses that are made in the background, and conversations, by OpenAI's client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.keys import KeyFile
from support.mock_llm import say, write_mock_llm
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.auth.api_keys import Scope


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """The response when it is over."""
    found: list[Any] = []

    def is_over() -> bool:
        found.append(client.responses.retrieve(response_id))
        return found[-1].status not in ("queued", "in_progress")

    until_true(is_over, "the response is over")
    return found[-1]


def test_a_response_is_made_while_no_client_waits(client: openai.OpenAI) -> None:
    made = client.responses.create(model="mock", input="one two", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    found = ended(client, made.id)
    assert (found.status, found.output_text, found.usage.output_tokens) == ("completed", "one two", 2)
    assert client.responses.cancel(made.id).status == "completed"
    follows = client.responses.create(model="mock", input="three", previous_response_id=made.id)
    assert follows.output_text == "three"
    broken = client.responses.create(model="mock", input=say(text="one two", error=1), background=True)
    failed = ended(client, broken.id)
    assert (failed.status, "the model broke" in failed.error.message) == ("failed", True)


def test_its_events_are_streamed_at_once_and_again(client: openai.OpenAI, llm_server: RunningServer) -> None:
    """A client that lost its connection goes on after the last event that it has seen, while the response is made."""

    def num_inflight() -> int:
        return llm_server.server.repository.get("mock", None).inflight

    script = say(text="one two three", pause=0.05)
    with client.responses.create(model="mock", input=script, background=True, stream=True) as events:
        seen = [next(iter(events)) for _ in range(3)]
    assert [event.type for event in seen] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=2))
    assert [event.sequence_number for event in rest] == list(range(3, 3 + len(rest)))
    assert "".join(event.delta for event in rest if event.type == "response.output_text.delta") == "one two three"
    assert rest[-1].type == "response.completed"
    again = list(client.responses.retrieve(response_id, stream=True))
    assert [event.to_json() for event in again] == [event.to_json() for event in [*seen, *rest]]
    until_true(lambda: num_inflight() == 0, "the model is free")


def test_long_instructions_are_in_each_event_with_the_whole_response(client: openai.OpenAI) -> None:
    """More than the events of one response may have, of which each but the deltas repeats them."""
    instructions = "be brief \N{SNOWMAN} " * 480_000
    made = client.responses.create(
        model="mock", input=say(text="one two"), instructions=instructions, background=True, stream=True
    )
    events = list(made)
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "one two"
    assert {event.response.instructions for event in events if hasattr(event, "response")} == {instructions}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response_id = events[-1].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=1))
    assert [event.to_json() for event in rest] == [event.to_json() for event in events[2:]]


def test_what_is_made_can_be_cancelled(client: openai.OpenAI, llm_server: RunningServer) -> None:
    made = client.responses.create(model="mock", input=say(text="one two", hang=1), background=True, stream=True)
    events = iter(made)
    first = next(events)
    found = client.responses.cancel(first.response.id)  # type: ignore[union-attr]
    assert found.status == "cancelled"
    assert all(event.type != "response.completed" for event in events)
    assert client.responses.retrieve(found.id).status == "cancelled"
    until_true(lambda: llm_server.server.repository.get("mock", None).inflight == 0, "the model was told")
    hanging = client.responses.create(model="mock", input=say(text="one", hang=0), background=True)
    client.responses.delete(hanging.id)
    until_true(lambda: llm_server.server.repository.get("mock", None).inflight == 0, "deleting ends it")
    with pytest.raises(openai.BadRequestError, match="background: true"):
        client.responses.cancel(client.responses.create(model="mock", input="one").id)
    quiet = client.responses.create(model="mock", input="one", background=True)
    with pytest.raises(openai.BadRequestError, match="stream: true"):
        client.responses.retrieve(quiet.id, stream=True)


def test_few_responses_are_made_in_the_background_at_once(http: httpx.Client) -> None:
    body = {"model": "mock", "input": say(text="one", hang=0), "background": True}
    made = [http.post("/v1/responses", json=body) for _ in range(64)]
    assert {answer.status_code for answer in made} == {200}
    refused = http.post("/v1/responses", json=body)
    assert (refused.status_code, "64 responses" in refused.json()["error"]["message"]) == (429, True)
    for answer in made:
        http.delete(f"/v1/responses/{answer.json()['id']}")


def reported(response: Any) -> list[tuple[str, str]]:
    messages = json.loads(json.loads(response.output_text)["messages"])["messages"]
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
def test_responses_are_turns_of_a_conversation(client: openai.OpenAI, how: dict[str, Any]) -> None:
    conversation = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "zero"}])

    def ask(text: str) -> Any:
        made: Any = client.responses.create(model="mock", input=text, conversation=conversation.id, **how)
        if how.get("stream"):
            return list(made)[-1].response
        return ended(client, made.id) if how else made

    first = ask("one two")
    assert first.conversation.id == conversation.id
    found = reported(ask(say(report=True)))
    assert found[:-1] == [("user", "zero\n\none two"), ("assistant", "zero\n\none two")]
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]


def test_a_conversation_is_changed_and_read_by_its_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    texts = [f"number {number}" for number in range(5)]
    call: Any = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    added = client.conversations.items.create(
        conversation.id, items=[*({"role": "user", "content": text} for text in texts), call]
    )
    assert [item.type for item in added.data] == ["message"] * 5 + ["function_call"]
    pages = client.conversations.items.list(conversation.id, limit=2)
    assert [item.id for item in pages] == [item.id for item in added.data[::-1]]
    first = client.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)  # type: ignore[arg-type]
    assert first.content[0].text == "number 0"  # type: ignore[union-attr]
    client.conversations.items.delete(first.id, conversation_id=conversation.id)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="Item"):
        client.conversations.items.retrieve(first.id, conversation_id=conversation.id)  # type: ignore[arg-type]
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError, match="Conversation"):
        client.conversations.retrieve(conversation.id)


def refusals(client: openai.OpenAI, conversation_id: str, response_id: str) -> list[Callable[[], object]]:
    return [
        lambda: client.conversations.retrieve(conversation_id),
        lambda: client.conversations.update(conversation_id, metadata={}),
        lambda: client.conversations.items.list(conversation_id),
        lambda: client.conversations.items.create(conversation_id, items=[]),
        lambda: client.conversations.delete(conversation_id),
        lambda: client.responses.create(model="mock", input="one", conversation=conversation_id),
        lambda: client.responses.retrieve(response_id),
        lambda: client.responses.retrieve(response_id, stream=True),
        lambda: client.responses.cancel(response_id),
    ]


def test_conversations_and_responses_belong_to_their_key(tmp_path: Path) -> None:
    write_mock_llm(tmp_path / "models", "mock")
    keys = KeyFile(tmp_path / "keys.yaml")
    one, other = keys.add("one", Scope.INFER), keys.add("other", Scope.INFER)
    with running_server(tmp_path / "models", api_keys_file=str(keys.path)) as server:
        url = f"http://{server.http_url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key=one, max_retries=0) as owner,
            openai.OpenAI(base_url=url, api_key=other, max_retries=0) as stranger,
        ):
            conversation = owner.conversations.create()
            made = owner.responses.create(
                model="mock", input="one", conversation=conversation.id, background=True, stream=True
            )
            response_id = next(iter(made)).response.id  # type: ignore[union-attr]
            for refused in refusals(stranger, conversation.id, response_id):
                with pytest.raises(openai.NotFoundError):
                    refused()
            assert ended(owner, response_id).output_text == "one"
            assert len(owner.conversations.items.list(conversation.id).data) == 2


def test_deleted_items_make_room_in_a_conversation(http: httpx.Client) -> None:
    long = {"items": [{"role": "user", "content": "x" * (5 << 20)}]}
    path = f"/v1/conversations/{http.post('/v1/conversations', json=long).json()['id']}/items"
    refused = http.post(path, json=long)
    assert (refused.status_code, "delete items" in refused.json()["error"]["message"]) == (400, True)
    (item,) = http.get(path).json()["data"]
    http.delete(f"{path}/{item['id']}")
    assert http.post(path, json=long).status_code == 200


def test_a_key_takes_no_room_of_others(tmp_path: Path) -> None:
    """Neither what is kept, nor what is made in the background."""
    write_mock_llm(tmp_path / "models", "mock")
    keys = KeyFile(tmp_path / "keys.yaml")
    headers = [{"Authorization": f"Bearer {keys.add(name, Scope.INFER)}"} for name in ("one", "other")]
    hangs = {"model": "mock", "input": say(text="one", hang=0), "background": True}
    with (
        running_server(tmp_path / "models", api_keys_file=str(keys.path), exit_timeout_secs=30) as server,
        httpx.Client(base_url=f"http://{server.http_url}/v1", headers=headers[0], timeout=20) as one,
        httpx.Client(base_url=f"http://{server.http_url}/v1", headers=headers[1], timeout=20) as other,
    ):
        made = one.post("/responses", json=hangs).json()["id"]
        kept = one.post("/conversations", json={}).json()["id"]
        for _ in range(31):
            one.post("/responses", json=hangs)
        refused = one.post("/responses", json=hangs)
        assert (refused.status_code, "32 responses of your key" in refused.json()["error"]["message"]) == (429, True)
        long = {"items": [{"role": "user", "content": "x" * (7 << 20)}]}
        mine = [other.post("/conversations", json=long).json()["id"] for _ in range(12)]
        assert one.get(f"/conversations/{kept}").status_code == 200
        assert [other.get(f"/conversations/{each}").status_code for each in mine] == [404] * 3 + [200] * 9
        assert other.post("/responses", json=hangs).json()["status"] == "queued"
        assert one.get(f"/responses/{made}").json()["status"] in ("queued", "in_progress")
        began_s = time.monotonic()
    # What they would still make, no client could ask for.
    assert time.monotonic() - began_s < 15
    assert not server.server.is_abandoned


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ("", {"items": [{"type": "function_call", "name": "a", "arguments": "["}]}, "items[0].arguments"),
        ("", {"metadata": {"a": "x" * 513}}, "metadata.a"),
        ("", {"metadata": {"a": [1]}}, "metadata.a"),
        ("/items", {}, "items"),
        ("/items", {"items": [{"role": "nobody", "content": "x"}]}, "items[0].role"),
    ],
)
def test_wrong_conversations_are_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    made = http.post("/v1/conversations", json={}).json()["id"]
    answer = http.post(f"/v1/conversations/{made}{path}" if path else "/v1/conversations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nothing"])
def test_wrong_pages_of_items_are_refused(http: httpx.Client, query: str) -> None:
    made = http.post("/v1/conversations", json={}).json()["id"]
    answer = http.get(f"/v1/conversations/{made}/items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])

"""What coding agents send in a session of three turns, as they sent it, but for their texts.

`claude_code.json` is of Claude Code 2.1, `codex.json` of Codex 0.171: the last request, which holds the session so far.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.events import events_of
from support.mock_llm import say_in_turns
from support.serving import RunningServer

REPORT = {"report": True}


def turns_of(name: str, member: str) -> list[dict[str, Any]]:
    """The requests of the session: each holds the items of the one before, and more."""
    text = (Path(__file__).parent / f"{name}.json").read_text()
    whole = json.loads(text.replace("SCRIPT", json.dumps(say_in_turns(REPORT))[1:-1]))
    items = whole["body"][member]
    spoken = [place for place, item in enumerate(items) if item.get("role") == "assistant"]
    spoken = [place - (items[place - 1].get("type") == "reasoning") for place in spoken]
    found = []
    for end in [*spoken, len(items)]:
        turn = copy.deepcopy(whole)
        turn["body"][member] = items[:end]
        found.append(turn)
    return found


def streamed(server: RunningServer, turn: dict[str, Any]) -> list[dict[str, Any]]:
    url = f"http://{server.http_url}{turn['path']}"
    answer = httpx.post(url, json=turn["body"], headers=turn["headers"], timeout=20)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


@pytest.mark.parametrize(
    ("name", "member", "kind", "roles"),
    [
        (
            "claude_code",
            "messages",
            "content_block_delta",
            ["system", "user", "assistant", "tool", "assistant", "tool"],
        ),
        ("codex", "input", "response.output_text.delta", ["system", "user", "assistant", "tool", "assistant", "tool"]),
    ],
)
def test_each_turn_continues_the_prompt_of_the_one_before(
    llm_server: RunningServer, name: str, member: str, kind: str, roles: list[str]
) -> None:
    """So that what is cached of it is found again, whatever agents change in between."""
    seen: list[dict[str, Any]] = []
    for turn in turns_of(name, member):
        events = [event for event in streamed(llm_server, turn) if event["type"] == kind]
        deltas = [event["delta"] for event in events]
        text = "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)
        conversation = json.loads(json.loads(text)["messages"])
        messages = conversation["messages"]
        assert messages[: len(seen)] == seen
        seen = messages
    assert [message["role"] for message in seen] == roles
    assert seen[2]["reasoning_content"] == "Hm."
    called = seen[2]["tool_calls"][0]["function"]
    assert "cat notes.txt" in called["arguments"].values()
    assert "cch=" not in json.dumps(seen)
    assert called["name"] in [tool["function"]["name"] for tool in conversation["tools"]]

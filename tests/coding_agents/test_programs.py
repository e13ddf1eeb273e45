"""Coding agents themselves hold a session of three turns: they read a file, write another, and say so."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.mock_llm import say_in_turns
from support.serving import RunningServer
from support.tools import tool


def calls(name: str, *all_arguments: dict[str, str]) -> str:
    """A script that calls one tool in each turn, and ends with words."""
    texts = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': each})}\n</tool_call>" for each in all_arguments]
    return say_in_turns(
        {"text": f"<think>Hm.</think>I look.\n{texts[0]}"},
        *({"text": each} for each in texts[1:]),
        {"text": "It is done."},
    )


def run(home: Path, *command: str, **variables: str) -> str:
    """What a program prints that has no home but `home` and no input."""
    environment = {**os.environ, "HOME": str(home), **variables}
    ended = subprocess.run(
        command,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("a note\n")
    return tmp_path


@pytest.mark.tool("claude-code")
def test_claude_code_works_by_its_tools(llm_server: RunningServer, home: Path) -> None:
    script = calls(
        "Bash",
        {"command": "cat notes.txt", "description": "read"},
        {"command": "cat notes.txt notes.txt > twice.txt", "description": "write"},
    )
    printed = run(
        home,
        f"{tool('claude-code')}/node_modules/@anthropic-ai/claude-code-linux-x64/claude",
        *("-p", script, "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose"),
        ANTHROPIC_BASE_URL=f"http://{llm_server.http_url}",
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="agent",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="agent",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    events = [json.loads(line) for line in printed.splitlines()]
    assert (home / "twice.txt").read_text() == "a note\na note\n"
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert (events[-1]["subtype"], events[-1]["result"], events[-1]["num_turns"]) == ("success", "It is done.", 3)


@pytest.mark.tool("node", "codex")
def test_codex_works_by_its_tools(llm_server: RunningServer, home: Path) -> None:
    script = calls("exec_command", {"cmd": "cat notes.txt"}, {"cmd": "cat notes.txt notes.txt > twice.txt"})
    provider = f'{{name="local", base_url="http://{llm_server.http_url}/v1", wire_api="responses"}}'
    printed = run(
        home,
        *(tool("node"), f"{tool('codex')}/node_modules/@openai/codex/bin/codex.js", "exec", "--json"),
        *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", "model_provider=local", "-c", "model=agent", "-c", f"model_providers.local={provider}"),
        script,
    )
    assert (home / "twice.txt").read_text() == "a note\na note\n"
    items = [event["item"] for event in map(json.loads, printed.splitlines()) if event["type"] == "item.completed"]
    assert [item["type"] for item in items[1:]] == [
        "agent_message",
        "command_execution",
        "command_execution",
        "agent_message",
    ]
    assert items[2]["aggregated_output"] == "a note\n"
    assert items[-1]["text"] == "It is done."

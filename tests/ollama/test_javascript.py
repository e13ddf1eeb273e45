"""Ollama's client of JavaScript, unmodified."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.serving import RunningServer
from support.tools import tool

PROGRAM = Path(__file__).parent.parent / "clients" / "node" / "ollama_js.js"


@pytest.mark.tool("node", "ollama-js")
def test_the_client_finds_all_that_it_asks_for(llm_server: RunningServer) -> None:
    environment = {**os.environ, "NODE_PATH": f"{tool('ollama-js')}/node_modules"}
    command = [tool("node"), str(PROGRAM), llm_server.http_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {line["name"]: line["found"] for line in map(json.loads, ended.stdout.splitlines())} == {
        "chat": "one two three",
        "stream": "one two three",
        "generate": [True, "length", 1],
        "list": True,
        "show": ["completion"],
        "embed": 2,
        "ps": True,
        "absent": [404, True],
        "pull": [400, True],
    }

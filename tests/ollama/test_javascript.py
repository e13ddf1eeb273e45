"""Ollama's client of JavaScript, unmodified."""

from __future__ import annotations

import pytest
from support.client_programs import run_node
from support.serving import RunningServer


@pytest.mark.tool("node", "ollama-js")
def test_the_client_finds_all_that_it_asks_for(llm_server: RunningServer) -> None:
    assert run_node("ollama-js", "ollama_js.js", llm_server.http_url) == {
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

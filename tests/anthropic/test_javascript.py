"""Anthropic's client of JavaScript, unmodified."""

from __future__ import annotations

import pytest
from support.client_programs import run_node
from support.serving import RunningServer


@pytest.mark.tool("node", "anthropic-js")
def test_the_client_finds_all_that_it_asks_for(llm_server: RunningServer) -> None:
    assert run_node("anthropic-js", "anthropic_js.js", llm_server.http_url) == {
        "message": ["one two three", "end_turn"],
        "stream": "one two three",
        "tools": [["thinking", "text", "tool_use"], "weather", {"city": "Oslo"}, "tool_use"],
        "result": "12 degrees",
        "count": 3,
        "absent": [404, "not_found_error"],
    }

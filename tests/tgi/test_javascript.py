"""Hugging Face's client of JavaScript, unmodified."""

from __future__ import annotations

import pytest
from support.client_programs import run_node
from support.serving import RunningServer


@pytest.mark.tool("node", "huggingface-js")
@pytest.mark.parametrize("has_own_port", [True, False])
def test_the_client_finds_all_that_it_asks_for(tgi_server: RunningServer, url: str, has_own_port: bool) -> None:
    """It names the address as the model where its caller names none."""
    endpoint = url if has_own_port else f"http://{tgi_server.http_url}"
    assert run_node("huggingface-js", "huggingface_js.js", endpoint) == {
        "text": "one two",
        "text stream": "one two",
        "chat": "one two three",
        "chat stream": "one two three",
        "named": "one two three",
        "refused": [400, "max_tokens"],
    }

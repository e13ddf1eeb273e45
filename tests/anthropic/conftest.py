"""Mock language models behind a whole server, and Anthropic's own client of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server

if TYPE_CHECKING:
    import anthropic  # for seconds


def write_models(root: Path) -> None:
    """One with everything, one with tools and reasoning, and one of another kind."""
    write_mock_llm(root, "mock", parameters={"max_model_len": "512"})
    write_mock_llm(root, "agent", parameters={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    write_mock_llm(root, "encoder", inputs=("text_input",), outputs=("embedding", "num_input_tokens"))


@pytest.fixture(scope="session")
def llm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("anthropic")
    write_models(root)
    with running_server(root) as running:
        yield running


@pytest.fixture
def client(llm_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client; it does not try again."""
    import anthropic

    url = f"http://{llm_server.http_url}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
def http(llm_server: RunningServer) -> Iterator[httpx.Client]:
    """For shapes that Anthropic's client does not show or does not send."""
    with httpx.Client(base_url=f"http://{llm_server.http_url}", timeout=20) as connected:
        yield connected

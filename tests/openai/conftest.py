"""Mock language models behind a whole server, and OpenAI's own client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.mock_llm import PLAIN_INPUTS, PLAIN_OUTPUTS, write_mock_llm
from support.serving import RunningServer, running_server


def write_models(root: Path) -> None:
    """One with everything, three with less (tools and reasoning, harmony, the least), and one of another kind."""
    write_mock_llm(root, "mock", parameters={"max_model_len": "512"})
    write_mock_llm(root, "agent", parameters={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    write_mock_llm(root, "oss", parameters={"reasoning_parser": "openai_gptoss"})
    write_mock_llm(root, "plain", inputs=PLAIN_INPUTS, outputs=PLAIN_OUTPUTS)
    write_mock_llm(root, "encoder", inputs=("text_input", "input_ids"), outputs=("embedding", "num_input_tokens"))


@pytest.fixture(scope="session")
def llm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("llm")
    write_models(root)
    with running_server(root) as running:
        yield running


@pytest.fixture
def client(llm_server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client; it does not try again."""
    with openai.OpenAI(base_url=f"http://{llm_server.http_url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
async def async_client(llm_server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{llm_server.http_url}/v1", api_key="none", max_retries=0
    ) as connected:
        yield connected


@pytest.fixture
def http(llm_server: RunningServer) -> Iterator[httpx.Client]:
    """For shapes that OpenAI's client does not show or does not send."""
    with httpx.Client(base_url=f"http://{llm_server.http_url}", timeout=20) as connected:
        yield connected

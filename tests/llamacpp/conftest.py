"""Mock language models behind a whole server, on the shared port and on llama.cpp's own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.layouts import free_port
from support.mock_llm import INPUTS, write_mock_llm
from support.serving import RunningServer, running_server


@pytest.fixture(scope="session")
def own_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory, own_port: int) -> Iterator[RunningServer]:
    """One language model, and one that makes embeddings."""
    root = tmp_path_factory.mktemp("llamacpp")
    template = "{{ messages[-1].content }}"
    write_mock_llm(root, "mock", parameters={"max_model_len": "512", "chat_template": template})
    write_mock_llm(root, "encoder", inputs=("text_input", "input_ids"), outputs=("embedding", "num_input_tokens"))
    with running_server(root, api=(f"llamacpp={own_port}",)) as running:
        yield running


@pytest.fixture
def http(llama_server: RunningServer, own_port: int) -> Iterator[httpx.Client]:
    """At llama.cpp's own port."""
    with httpx.Client(base_url=f"http://127.0.0.1:{own_port}", timeout=20) as connected:
        yield connected


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """At a port with other APIs, of a server with two language models."""
    root = tmp_path_factory.mktemp("shared")
    write_mock_llm(root, "mock")
    write_mock_llm(root, "other", inputs=tuple(INPUTS))
    with running_server(root) as running, httpx.Client(base_url=f"http://{running.http_url}", timeout=20) as connected:
        yield connected

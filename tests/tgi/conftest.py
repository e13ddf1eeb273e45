"""Mock language models behind a whole server, and the clients of TGI of them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from huggingface_hub import InferenceClient
from support.layouts import ADDRESS, free_port
from support.mock_llm import PLAIN_INPUTS, PLAIN_OUTPUTS, write_mock_llm
from support.serving import RunningServer, running_server
from text_generation import Client


@pytest.fixture(scope="session")
def tgi_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def tgi_server(tmp_path_factory: pytest.TempPathFactory, tgi_port: int) -> Iterator[RunningServer]:
    """One language model, as with TGI, and a model of another kind."""
    root = tmp_path_factory.mktemp("tgi")
    write_mock_llm(root, "mock", parameters={"max_model_len": "512"})
    write_mock_llm(root, "encoder", inputs=("text_input",), outputs=("embedding", "num_input_tokens"))
    with running_server(root, api=(f"tgi={tgi_port}",)) as running:
        yield running


@pytest.fixture(scope="session")
def plain_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two language models, one that has the least, so that requests must name theirs."""
    root = tmp_path_factory.mktemp("plain")
    write_mock_llm(root, "mock")
    write_mock_llm(root, "plain", inputs=PLAIN_INPUTS, outputs=PLAIN_OUTPUTS)
    port = free_port()
    with running_server(root, api=(f"tgi={port}",)):
        yield f"http://{ADDRESS}:{port}"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The port that all APIs share."""
    root = tmp_path_factory.mktemp("shared")
    write_mock_llm(root, "mock")
    with running_server(root) as running, httpx.Client(base_url=f"http://{running.http_url}", timeout=20) as connected:
        yield connected


@pytest.fixture
def url(tgi_server: RunningServer, tgi_port: int) -> str:
    return f"http://{ADDRESS}:{tgi_port}"


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


@pytest.fixture
def hub(url: str) -> InferenceClient:
    return InferenceClient(url)


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """For shapes that the clients do not show or do not send."""
    with httpx.Client(base_url=url, timeout=20) as connected:
        yield connected

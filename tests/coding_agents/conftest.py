"""A mock language model that calls tools, behind a whole server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server


@pytest.fixture(scope="session")
def llm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("agents")
    write_mock_llm(root, "agent", parameters={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    with running_server(root) as running:
        yield running

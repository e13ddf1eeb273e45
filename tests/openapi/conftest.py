"""One server with a language model and a model of tensors, and the same behind API keys."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.keys import KeyFile
from support.mock_llm import write_mock_llm
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import SCOPES, Scope


@pytest.fixture(scope="session")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("described")
    write_mock_llm(root, "mock")
    write_identity(root, "same")
    options = {"model_control_mode": "explicit", "load_model": ("mock", "same"), "api": ("ollama=off",)}
    with running_server(root, **options) as running:
        yield running


@pytest.fixture
def http(open_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{open_server.http_url}", timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    file.add("everything", *SCOPES)
    file.add("tenant", Scope.INFER, models=("mo*",))
    return file


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory, keys: KeyFile) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("keyed")
    write_mock_llm(root, "mock")
    write_identity(root, "same")
    options = {"api_keys_file": str(keys.path), "http_restricted_api": ("logging:secret=s3cret",)}
    with running_server(root, **options) as running:
        yield running

"""A host to pull from, and an empty store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.model_sources import FakeHost, fake_host

from modelserver.store import download
from modelserver.store.store import Store


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    monkeypatch.setattr(download, "_PAUSES_S", (0.0, 0.0))
    with fake_host() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return Store(tmp_path / "store")

"""One server over small models of all libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.serving import RunningServer, running_server
from support.tabular_models import Trained, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="session")
def tables(trained: Trained) -> Iterator[RunningServer]:
    with running_server(trained.repository, allow_pickle_models=True) as server:
        yield server

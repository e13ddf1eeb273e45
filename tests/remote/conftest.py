"""A server that executes models, and one whose models are remote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server

REPEAT = """
backend: "repeat"
input [ { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] } ]
input [ { name: "DELAY", data_type: TYPE_UINT32, dims: [ -1 ] } ]
input [ { name: "WAIT", data_type: TYPE_UINT32, dims: [ 1 ] } ]
output [ { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
output [ { name: "IDX", data_type: TYPE_UINT32, dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="package")
def back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("back")
    write_identity(repository)
    write_identity(repository, "texts", data_type="TYPE_STRING")
    write_identity(repository, "slow", execute_delay_ms=400)
    write_identity(repository, "shapes", data_type="TYPE_INT64", max_batch_size=0)
    write_model(repository, "repeat", REPEAT)
    with running_server(repository) as running:
        yield running

"""Both protocols as one, for tests that have many requests in flight."""

from __future__ import annotations

import pytest
from support.async_clients import AsyncClient, AsyncGrpcClient, AsyncHttpClient


@pytest.fixture(params=["http", "grpc"])
def async_protocol(request: pytest.FixtureRequest) -> type[AsyncClient]:
    """The asyncio client class of each protocol in turn."""
    return {"http": AsyncHttpClient, "grpc": AsyncGrpcClient}[request.param]

"""tritonclient's asyncio clients behind the same face as `clients`: for tests that have many requests in flight.

Cancelling the task that awaits `infer` is a client that leaves: gRPC cancels the call, HTTP closes the connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import tritonclient.grpc.aio
import tritonclient.http.aio
from support.clients import Answer, Array, GrpcClient, HttpClient, ProtocolClient
from support.serving import RunningServer
from tritonclient.utils import InferenceServerException

# As many requests as a test likes are in flight at once; aiohttp would queue them beyond its limit.
_MAX_CONNECTIONS = 1000


class AsyncClient(ProtocolClient):
    """A connected client; an async context manager."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.raw.close()
        # grpcio's poller thread lives as long as a channel does, and pytest keeps a test's fixtures to the very end.
        del self.raw

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] | None = None,
        *,
        version: str = "",
        datatypes: Mapping[str, str] | None = None,
        **details: Any,
    ) -> Answer:
        """As `ProtocolClient.infer`."""
        arguments = self._arguments(model, inputs, outputs, version, datatypes or {})
        try:
            result = await self.raw.infer(**arguments, **details)
        except InferenceServerException as error:
            raise self._error(error) from None
        return self._answer(result)


class AsyncHttpClient(AsyncClient, HttpClient):
    """tritonclient.http.aio."""

    def __init__(self, server: RunningServer) -> None:
        self.raw = tritonclient.http.aio.InferenceServerClient(server.http_url, conn_limit=_MAX_CONNECTIONS)


class AsyncGrpcClient(AsyncClient, GrpcClient):
    """tritonclient.grpc.aio."""

    def __init__(self, server: RunningServer) -> None:
        self.raw = tritonclient.grpc.aio.InferenceServerClient(server.grpc_url)

"""The server on which a model is tuned: requests of tuning besides inference, over HTTP or gRPC."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from modelserver.client.address import Address, Tls, parse_address
from modelserver.client.control import Control, GrpcControl, HttpControl
from modelserver.client.server_client import CA_VARIABLE, CERTIFICATE_KEY_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE

HTTP_PORT, HTTPS_PORT, GRPC_PORT = 80, 443, 8001

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TunedServer:
    """Its methods block, and raise ServerError with the server's words; each has a connection of its own."""

    address: Address
    is_grpc: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def index(self) -> list[dict[str, Any]]:
        return self._ask(lambda control: control.index())

    def metadata(self, model: str) -> dict[str, Any]:
        return self._ask(lambda control: control.metadata(model, ""))

    def config(self, model: str) -> dict[str, Any]:
        return self._ask(lambda control: control.config(model, ""))

    def load(self, model: str, config: dict[str, Any] | None = None) -> None:
        """With `config` in place of the model's own, where it is given."""
        self._ask(lambda control: control.load(model, config))

    def unload(self, model: str) -> None:
        self._ask(lambda control: control.unload(model))

    def _ask(self, question: Callable[[Control], Awaitable[Result]]) -> Result:
        async def ask() -> Result:
            control: Control = (GrpcControl if self.is_grpc else HttpControl)(self.address, self.headers)
            try:
                return await question(control)
            finally:
                control.close()

        return asyncio.run(ask())


def tuned_server(url: str, *, is_grpc: bool) -> TunedServer:
    """The server at `url`, with the key and the files of the variables that all commands read.

    Raises InvalidArgumentError for an invalid address.
    """
    is_secure = url.startswith(("https://", "grpcs://"))
    authorities, certificate, own_key = (
        os.environ.get(name, "") for name in (CA_VARIABLE, CERTIFICATE_VARIABLE, CERTIFICATE_KEY_VARIABLE)
    )
    default_port = GRPC_PORT if is_grpc else HTTPS_PORT if is_secure else HTTP_PORT
    address = parse_address(
        url, default_port=default_port, tls=Tls(authorities, certificate, own_key) if is_secure else None
    )
    key = os.environ.get(KEY_VARIABLE, "")
    # In lower case, as HTTP/2 wants names.
    return TunedServer(address, is_grpc, {"authorization": f"Bearer {key}"} if key else {})

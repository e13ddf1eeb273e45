"""One port of a server: where it is, which protocol it speaks, and how requests to it are authorized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserver.client.address import Address, environment_headers, environment_tls, parse_address
from modelserver.client.control import TIMEOUT_S, ControlClient
from modelserver.client.grpc_client import GrpcClient
from modelserver.client.server_client import ServerClient

HTTP_PORT, HTTPS_PORT, GRPC_PORT = 80, 443, 8001


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`headers` go with every request."""

    address: Address
    is_grpc: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def control(self, *, timeout_s: float = TIMEOUT_S) -> ControlClient:
        """A client for the calls besides inference. `timeout_s` limits calls other than loads over gRPC, and waits
        for data over HTTP."""
        if self.is_grpc:
            return GrpcClient(self.address, self.headers)
        scheme = "http" if self.address.tls is None else "https"
        return ServerClient(
            f"{scheme}://{self.address}", timeout_s=timeout_s, tls=self.address.tls, headers=self.headers
        )


def endpoint_at(url: str, *, is_grpc: bool) -> Endpoint:
    """The endpoint at `url`, with the key and the TLS files of the environment.

    Raises InvalidArgumentError if `url` is not an address.
    """
    is_secure = url.startswith(("https://", "grpcs://"))
    default_port = GRPC_PORT if is_grpc else HTTPS_PORT if is_secure else HTTP_PORT
    address = parse_address(url, default_port=default_port, tls=environment_tls() if is_secure else None)
    return Endpoint(address, is_grpc, environment_headers())

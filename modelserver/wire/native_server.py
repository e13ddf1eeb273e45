"""A port of our own wire: HTTP/1.1 and HTTP/2, REST and gRPC, chosen by each client."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from modelserver.protocol.call import GrpcHandler
from modelserver.protocol.exchange import HttpHandler
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.acceptor import Acceptor
from modelserver.wire.address import Address, authority
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.limits import WireLimits
from modelserver.wire.port import Port
from modelserver.wire.tls import TlsFiles

_logger = logging.getLogger(__name__)


class NativeServer:
    """Listens on one address from `start` to `stop`. Everything happens on the event loop that calls `start`.

    A protocol without a frontend is refused. `counts` may be shared by the ports of a server; `name` is the port's name
    in the log.
    """

    def __init__(
        self,
        address: Address,
        *,
        http: HttpHandler | None = None,
        grpc: GrpcHandler | None = None,
        limits: WireLimits | None = None,
        counts: WireCounts | None = None,
        tls: TlsFiles | None = None,
        name: str = "HTTP and gRPC",
    ) -> None:
        self._address = address
        self._http = http
        self._grpc = grpc
        self._limits = limits or WireLimits()
        self._counts = counts or WireCounts()
        self._tls = tls
        self._name = name
        self._port: Port | None = None
        self._acceptor: Acceptor | None = None

    @property
    def port(self) -> int:
        """The port that it listens on; the real one if 0 was requested."""
        return self._address.port

    async def start(self) -> None:
        """Listen. Raises UnavailableError, naming the flag, when the address cannot be had, and
        InvalidArgumentError when a file of the certificate is invalid."""
        port = Port(
            self._name,
            http=self._http,
            grpc=self._grpc,
            limits=self._limits,
            counts=self._counts,
            http1=Http1Connection,
            http2=Http2Connection,
            tls=self._tls,
        )
        bound = self._address.bind()
        self._address = replace(self._address, port=bound.getsockname()[1])
        self._port = port
        self._acceptor = Acceptor(asyncio.get_running_loop(), bound, port.take)
        port.start()
        self._acceptor.start()
        where = authority(self._address.host, self.port)
        _logger.info("%s listens on %s%s", self._name, where, " with TLS" if self._tls is not None else "")

    def retire(self) -> None:
        """Serve requests, and let answers tell clients, where the protocol can, to send the next ones elsewhere."""
        if self._port is not None:
            self._port.retire()

    async def stop(self, grace_s: float) -> None:
        """Accept no more, give requests in flight `grace_s` seconds to finish, then cut the rest."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is None or self._port is None:
            return
        acceptor.close()
        await self._port.stop(grace_s)

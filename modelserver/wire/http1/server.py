"""Our HTTP/1.1 server: a listener, its connections, and the patience it has with them."""

from __future__ import annotations

import asyncio

from modelserver.frontends.http.exchange import Frontend
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.listener import Connection, HttpListener, HttpOptions

_PATIENCE_CHECK_S = 1.0


class Http1Server:
    """An HTTP/1.1 listener for one frontend. Everything happens on the event loop that calls `start`."""

    def __init__(self, frontend: Frontend, host: str, port: int, options: HttpOptions | None = None) -> None:
        self._frontend = frontend
        self._listener = HttpListener(host, port, options or HttpOptions())
        self._connections: set[Http1Connection] = set()
        self._patience: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self._listener.port

    async def start(self) -> None:
        """Listen. Raises UnavailableError, naming the flag, when the address cannot be had."""
        loop = asyncio.get_running_loop()
        options = self._listener.options
        await self._listener.start(lambda: Http1Connection(self._frontend, options, self._connections, loop))
        self._check_patience(loop)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let requests in flight finish for `grace_s`, then cut what is left."""
        if self._patience is not None:
            self._patience.cancel()
        connections: set[Connection] = self._connections  # type: ignore[assignment]  # only read there
        await self._listener.stop(connections, grace_s)

    def _check_patience(self, loop: asyncio.AbstractEventLoop) -> None:
        # One timer for all connections: a timer per request would cost more than its parsing.
        for connection in list(self._connections):
            connection.check_patience(loop.time())
        self._patience = loop.call_later(_PATIENCE_CHECK_S, self._check_patience, loop)

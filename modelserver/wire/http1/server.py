"""Our HTTP/1.1 server: a listener, its connections, and the patience it has with them."""

from __future__ import annotations

import asyncio
from typing import cast

from modelserver.frontends.http.exchange import Frontend
from modelserver.telemetry.wire import WireCounts
from modelserver.wire.context import WireContext
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.limits import TimeLimits, WireLimits
from modelserver.wire.listener import Connection, HttpListener, HttpOptions
from modelserver.wire.outbox import Outbox

_SWEEP_S = 1.0


class _Connection(Http1Connection):
    """Begins with the accept, and says when it is gone."""

    def __init__(self, context: WireContext) -> None:
        super().__init__(context)
        self.closed: asyncio.Future[None] = context.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.begin(cast(asyncio.Transport, transport), b"")

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.closed.set_result(None)


class Http1Server:
    """An HTTP/1.1 listener for one frontend. Everything happens on the event loop that calls `start`."""

    def __init__(self, frontend: Frontend, host: str, port: int, options: HttpOptions | None = None) -> None:
        self._frontend = frontend
        self._listener = HttpListener(host, port, options or HttpOptions())
        self._context: WireContext | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self._listener.port

    async def start(self) -> None:
        """Listen. Raises UnavailableError, naming the flag, when the address cannot be had."""
        loop, options = asyncio.get_running_loop(), self._listener.options
        pause_s = options.receive_timeout_s
        times = TimeLimits(head_s=pause_s, body_pause_s=pause_s, http1_idle_s=options.keep_alive_s)
        limits = WireLimits(max_body_bytes=options.max_body_bytes, times=times)
        context = self._context = WireContext(loop, self._frontend, None, limits, WireCounts(), Outbox(loop))
        await self._listener.start(lambda: cast(asyncio.Protocol, _Connection(context)))
        self._sweep(context)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let requests in flight finish for `grace_s`, then cut what is left."""
        if self._sweeper is None or self._context is None:
            return
        self._sweeper.cancel()
        await self._listener.stop(cast("set[Connection]", self._context.connections), grace_s)

    def _sweep(self, context: WireContext) -> None:
        for connection in list(context.connections):
            connection.sweep(context.loop.time())
        self._sweeper = context.loop.call_later(_SWEEP_S, self._sweep, context)

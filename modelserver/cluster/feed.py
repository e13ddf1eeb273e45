"""Tells routers the replicas of each pool: `GET /cluster/v1/endpoints?pool=NAME`, a line of JSON after each change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
import uvloop

from modelserver.app.ports import HTTP, Frontends, make_ports
from modelserver.options.server_options import ServerOptions
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.response import json_response
from modelserver.telemetry.wire_counts import WireCounts

PATH: Final = "/cluster/v1/endpoints"
# A line without an endpoint after this time: the other side sees that the connection still stands.
_IDLE_S: Final = 5.0
_STOP_S: Final = 1.0
_CALL_S: Final = 10.0


def feed_url(host: str, port: int) -> str:
    """Where a feed is; a pool's is at `?pool=NAME` of it."""
    return f"http://{host}:{port}{PATH}"


class FeedEndpoint(msgspec.Struct, frozen=True):
    """A replica as `modelserver route` reads it."""

    name: str
    address: str
    port: str
    state: str
    labels: dict[str, str]


class Feed:
    """A port in a thread of its own; `publish` may be called from any thread."""

    def __init__(self, host: str, port: int) -> None:
        """Listens at once; port 0 takes a free one. Raises ServerError when the port cannot be had."""
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="membership", daemon=True)
        self._thread.start()
        self._handler = _FeedHandler(self._loop)
        options = ServerOptions(http_address=host, http_port=port, allow_grpc=False, allow_metrics=False)
        frontends = Frontends(dataplane=None, http=self._handler, grpc=None)

        async def open_port() -> Any:
            wire = make_ports(options, frontends, WireCounts())[HTTP]
            await wire.start()
            return wire

        try:
            self._wire = self._run(open_port())
        except BaseException:
            self._end()
            raise
        self.port: int = self._wire.port
        self.url = feed_url(host, self.port)

    def publish(self, pools: Mapping[str, Sequence[FeedEndpoint]]) -> None:
        """Tell those who read what has changed."""
        self._loop.call_soon_threadsafe(self._handler.publish, pools)

    def close(self) -> None:
        """End the streams, and close the port."""

        async def close() -> None:
            self._handler.close()
            await self._wire.stop(_STOP_S)

        self._run(close())
        self._end()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _FeedHandler(HttpHandler):
    """Event loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._generation = 0
        self._pools: Mapping[str, Sequence[FeedEndpoint]] | None = None
        # By pool: the line that those who read got last, and what wakes them for the next.
        self._lines: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(self, pools: Mapping[str, Sequence[FeedEndpoint]]) -> None:
        if pools == self._pools:
            return
        self._pools = pools
        self._generation += 1
        self._lines = {
            name: msgspec.json.encode({"generation": self._generation, "endpoints": endpoints}) + b"\n"
            for name, endpoints in pools.items()
        }
        self._wake()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def handle(self, exchange: HttpExchange) -> None:
        head = exchange.head
        name = parse_qs(head.query).get("pool", [""])[-1]
        if (head.method, head.path) != ("GET", PATH):
            exchange.respond(json_response({"error": f"there is only GET {PATH}?pool=NAME"}, 404))
        elif self._pools is None:
            exchange.respond(json_response({"error": "the replicas are not known yet"}, 503))
        elif name not in self._pools:
            known = ", ".join(sorted(self._pools)) or "none"
            exchange.respond(json_response({"error": f"there is no pool '{name:.100}'; the pools are: {known}"}, 404))
        else:
            task = self._loop.create_task(self._stream(exchange, name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stream(self, exchange: HttpExchange, name: str) -> None:
        writer = exchange.start(200, [("Content-Type", "application/x-ndjson")])
        sent = b""
        try:
            while name in self._lines:
                changed = self._changed
                line = self._lines[name]
                await writer.write(line if line != sent else b"\n")
                sent = line
                try:
                    async with asyncio.timeout(_IDLE_S):
                        await changed.wait()
                except TimeoutError:
                    continue
            await writer.close()
        except ConnectionError:
            return
        except asyncio.CancelledError:
            writer.abort()
            raise

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

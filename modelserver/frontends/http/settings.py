"""Requests that read and change settings: those of the log, and those of request tracing."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from modelserver.auth.access import ApiGroup
from modelserver.core.documents import beginning
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.json_body import with_object
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, json_response
from modelserver.telemetry.log_tail import NUM_KEPT, LogFollower

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane

_TEXT = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
_MAX_DIGITS = 9


class LogRoutes:
    """Answers the logging extension. Called from the event loop thread."""

    def __init__(self, controlplane: AnyControlPlane, limits: HttpLimits) -> None:
        self._controlplane = controlplane
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()  # kept, because the event loop does not

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/v2/logging", self.read, ApiGroup.LOGGING),
            Route("POST", "/v2/logging", self.update, ApiGroup.LOGGING),
            Route("GET", "/v2/logging/lines", self.lines, ApiGroup.LOGGING),
        )

    def read(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response(asdict(self._controlplane.logs.settings)))

    def update(self, exchange: HttpExchange) -> None:
        """The body names the settings to change; the answer has all of them."""

        def answer(document: dict[str, Any]) -> None:
            exchange.respond(json_response(asdict(self._controlplane.logs.update(document))))

        with_object(exchange, self._limits, answer)

    def lines(self, exchange: HttpExchange) -> None:
        """The newest lines as text: `?lines=N` of them (100); with `follow=true` also new ones as they are logged."""
        query = parse_qs(exchange.head.query, keep_blank_values=True)
        num_lines = _number_of_lines(query.get("lines", ["100"])[-1])
        follows = query.get("follow", ["false"])[-1].lower()
        if follows not in ("true", "false"):
            raise InvalidArgumentError(f"'follow' in the query must be true or false, got '{follows:.40}'")
        tail = self._controlplane.logs.tail
        if follows == "false":
            exchange.respond(HttpResponse(200, _TEXT, (_text(tail.newest(num_lines)),)))
            return
        follower = tail.follow(num_lines)
        task = asyncio.get_running_loop().create_task(_send(exchange, follower), name="log-lines")
        exchange.on_disconnect = lambda: _cancel(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _send(exchange: HttpExchange, follower: LogFollower) -> None:
    """Send lines until the client leaves, or the server stops."""
    writer = exchange.start(200, list(_TEXT))
    try:
        while lines := await follower.lines():
            await writer.write(_text(lines))
        await writer.close()
    except ConnectionError:
        return
    finally:
        follower.close()


def _text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _number_of_lines(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise InvalidArgumentError(f"'lines' in the query must be a number from 0 to {NUM_KEPT}, got '{text:.40}'")
    return min(int(text), NUM_KEPT)


class TraceRoutes:
    """Answers the trace extension. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def routes(self) -> tuple[Route, ...]:
        settings = (
            Route(method, pattern, call, ApiGroup.TRACE)
            for pattern in ("/v2/trace/setting", "/v2/models/{name}/trace/setting")
            for method, call in (("GET", self.read), ("POST", self.update))
        )
        return (*settings, Route("GET", "/v2/trace/recent", self.recent, ApiGroup.TRACE))

    def recent(self, exchange: HttpExchange) -> None:
        """The newest traces, wherever traces are written."""
        exchange.respond(json_response({"traces": self._dataplane.recent_traces()}))

    def read(self, exchange: HttpExchange, name: str = "") -> None:
        exchange.respond(json_response(self._dataplane.trace_settings(name)))

    def update(self, exchange: HttpExchange, name: str = "") -> None:
        """The body names the settings to change, with null for those to unset; the answer has all."""

        def answer(document: dict[str, Any]) -> None:
            for setting, value in document.items():
                _check(setting, value)
            exchange.respond(json_response(self._dataplane.update_trace_settings(document, name)))

        with_object(exchange, self._limits, answer)


def _check(setting: str, value: Any) -> None:
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    if value is not None and not isinstance(value, str) and not is_list:
        raise InvalidArgumentError(
            f"trace setting '{setting:.100}' must be a string, an array of strings or null, got {beginning(value, 40)}"
        )

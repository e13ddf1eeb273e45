"""The routes that change the server: models, shares of versions, shared memory, settings of log and trace."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from modelserver.auth.access import ApiGroup
from modelserver.core.documents import beginning
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.frontends.http.body import answer_errors, with_object
from modelserver.frontends.http.documents import index_document
from modelserver.frontends.http.inference import parse_version
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.platform.cuda import HANDLE_BYTES
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, bare_response, error_response, json_response
from modelserver.telemetry.log_tail import NUM_KEPT, LogFollower

Parameter = bool | int | str


class Control:
    """Answers `POST /v2/repository/...`. Loads and unloads run as Tasks, which this object keeps alive."""

    def __init__(self, controlplane: AnyControlPlane, limits: HttpLimits) -> None:
        self._controlplane = controlplane
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def index(self, exchange: HttpExchange, repository: str = "") -> None:
        """The rows of all models, or with `{"ready": true}` in the body of those that are ready."""

        def answer(document: dict[str, Any]) -> None:
            ready_only = document.get("ready", False)
            if not isinstance(ready_only, bool):
                raise InvalidArgumentError("'ready' in the index request must be a boolean")
            exchange.respond(json_response(index_document(self._controlplane.index(ready_only, repository))))

        with_object(exchange, self._limits, answer, has_unique_fields=False)

    def load(self, exchange: HttpExchange, name: str, repository: str = "", version: str | None = None) -> None:
        """Load or reload a model or a version; answers when it is ready or has failed. Files are base64."""
        number = parse_version(name, version)

        def submit(document: dict[str, Any]) -> None:
            parameters = _parameters(document)
            operation = self._controlplane.load(name, parameters, repository_name=repository, version=number)
            self._run(exchange, operation, {"name": name, "load": True})

        with_object(exchange, self._limits, submit, has_unique_fields=False)

    def unload(self, exchange: HttpExchange, name: str, repository: str = "", version: str | None = None) -> None:
        """Unload a model or a version."""
        number = parse_version(name, version)

        def submit(document: dict[str, Any]) -> None:
            parameters = _parameters(document)
            operation = self._controlplane.unload(name, parameters, repository_name=repository, version=number)
            self._run(exchange, operation, {"name": name, "unload": True})

        with_object(exchange, self._limits, submit, has_unique_fields=False)

    def _run(self, exchange: HttpExchange, operation: Coroutine[Any, Any, None], document: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(_answer(exchange, operation, document))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(exchange: HttpExchange, operation: Coroutine[Any, Any, None], document: dict[str, Any]) -> None:
    try:
        await operation
        response = bare_response(exchange.head.headers.get("accept"), document)
    except Exception as error:
        response = error_response(error)
    exchange.respond(response)


def _parameters(document: dict[str, Any]) -> dict[str, Parameter]:
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidArgumentError("'parameters' must be an object")
    for name, value in parameters.items():
        if not isinstance(value, bool | int | str):
            raise InvalidArgumentError(f"parameter '{name:.100}' must be a string, integer or boolean")
    return parameters


_PATH = "/v2/repository/models/{name}/traffic"


class TrafficRoutes:
    """Answers `GET`, `POST` and `DELETE` with the resulting traffic."""

    def __init__(self, controlplane: AnyControlPlane, limits: HttpLimits) -> None:
        self._controlplane = controlplane
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", _PATH, self._show, ApiGroup.MODEL_REPOSITORY),
            Route("POST", _PATH, self._set, ApiGroup.MODEL_REPOSITORY),
            Route("DELETE", _PATH, self._remove, ApiGroup.MODEL_REPOSITORY),
        )

    def _show(self, exchange: HttpExchange, name: str) -> None:
        exchange.respond(json_response(self._document(name)))

    def _set(self, exchange: HttpExchange, name: str) -> None:
        def submit(document: dict[str, Any]) -> None:
            persists = document.pop("persist", False)
            if not isinstance(persists, bool):
                raise InvalidArgumentError("'persist' must be a boolean")
            self._run(exchange, name, lambda: self._controlplane.set_traffic(name, document, persists=persists))

        with_object(exchange, self._limits, submit)

    def _remove(self, exchange: HttpExchange, name: str) -> None:
        async def remove() -> None:
            if self._controlplane.traffic(name) is None:
                raise NotFoundError(f"model '{name:.200}' has no traffic of its own: its highest version answers")
            await self._controlplane.remove_traffic(name)

        self._run(exchange, name, remove)

    def _run(self, exchange: HttpExchange, name: str, change: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange, name, change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: HttpExchange, name: str, change: Callable[[], Awaitable[None]]) -> None:
        try:
            await change()
            response = json_response(self._document(name))
        except Exception as error:
            response = error_response(error)
        exchange.respond(response)

    def _document(self, name: str) -> dict[str, Any]:
        traffic = self._controlplane.traffic(name)
        if traffic is None:
            return {"name": name}
        shares = {str(version): share for version, share in sorted(self._controlplane.traffic_shares(name).items())}
        counts = self._controlplane.shadow_counts(name)
        return {"name": name, **traffic.document, "shares": shares, "shadow_counts": counts}


_MAX_UINT64 = 2**64 - 1


class Regions:
    """Answers the shared memory extensions. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def routes(self) -> tuple[Route, ...]:
        """The routes of both kinds, for one region and for all."""
        return tuple(
            Route(method, f"/v2/{kind}sharedmemory{region}/{verb}", call, ApiGroup.SHARED_MEMORY)
            for kind, verbs in (
                ("system", (self.status, self.unregister, self.register)),
                ("cuda", (self.cuda_status, self.cuda_unregister, self.cuda_register)),
            )
            for method, verb, call in zip(
                ("GET", "POST", "POST"), ("status", "unregister", "register"), verbs, strict=True
            )
            for region in (("", "/region/{region}") if verb != "register" else ("/region/{region}",))
        )

    def register(self, exchange: HttpExchange, region: str) -> None:
        """`{"key": ..., "offset": ..., "byte_size": ...}`; no offset is 0."""

        def answer(document: dict[str, Any]) -> None:
            key = document.get("key")
            if not isinstance(key, str):
                raise _missing("key", "a string", key)
            offset = _size(document, "offset") if "offset" in document else 0
            self._dataplane.shared_memory.register(region, key, offset, _size(document, "byte_size"))
            exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

        self._dataplane.shared_memory.check_allowed()
        with_object(exchange, self._limits, answer)

    def unregister(self, exchange: HttpExchange, region: str = "") -> None:
        """Clients unregister all regions before they know whether any exist."""
        self._dataplane.shared_memory.unregister(region)
        exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

    def status(self, exchange: HttpExchange, region: str = "") -> None:
        rows = self._dataplane.shared_memory.statuses(region)
        document = [
            {"name": row.name, "key": row.key, "offset": row.offset, "byte_size": row.num_bytes} for row in rows
        ]
        exchange.respond(json_response(document))

    def cuda_register(self, exchange: HttpExchange, region: str) -> None:
        """`{"raw_handle": {"b64": ...}, "device_id": ..., "byte_size": ...}`."""

        def answer(document: dict[str, Any]) -> None:
            handle = _handle(document)
            device_id, num_bytes = _size(document, "device_id"), _size(document, "byte_size")

            def respond(_: None) -> None:
                exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

            then = partial(answer_errors, exchange, respond)
            self._dataplane.shared_memory.register_cuda(region, handle, device_id, num_bytes, then)

        self._dataplane.shared_memory.check_allowed()
        with_object(exchange, self._limits, answer)

    def cuda_unregister(self, exchange: HttpExchange, region: str = "") -> None:
        """As `unregister`."""
        self._dataplane.shared_memory.unregister(region, is_cuda=True)
        exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

    def cuda_status(self, exchange: HttpExchange, region: str = "") -> None:
        rows = self._dataplane.shared_memory.cuda_statuses(region)
        document = [{"name": row.name, "device_id": row.device_id, "byte_size": row.num_bytes} for row in rows]
        exchange.respond(json_response(document))


def _size(document: dict[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_UINT64:
        raise _missing(name, "an unsigned integer", value)
    return value


def _handle(document: dict[str, Any]) -> bytes:
    outer = document.get("raw_handle")
    text = outer.get("b64") if isinstance(outer, dict) else None
    if not isinstance(text, str):
        raise _missing("raw_handle", 'an object {"b64": "..."}', outer)
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise InvalidArgumentError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle


def _missing(name: str, expected: str, got: object) -> InvalidArgumentError:
    if got is None:
        return InvalidArgumentError(f"Shared memory register request has no '{name}' field; it must be {expected}")
    return InvalidArgumentError(
        f"shared memory register request: '{name}' must be {expected}, got {beginning(got, 40)}"
    )


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

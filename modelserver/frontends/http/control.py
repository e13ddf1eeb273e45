"""The repository routes: index, load, unload, and how versions share a model's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import ApiGroup
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.frontends.http.documents import index_document
from modelserver.frontends.http.inference import parse_version
from modelserver.frontends.http.json_body import with_object
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import bare_response, error_response, json_response

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyControlPlane

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

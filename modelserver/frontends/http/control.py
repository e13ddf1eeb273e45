"""The repository routes: index, load and unload."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.documents import index_document
from modelserver.frontends.http.inference import parse_version
from modelserver.frontends.http.json_body import with_object
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import bare_response, error_response, json_response

if TYPE_CHECKING:
    from modelserver.planes.control import AnyControlPlane

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

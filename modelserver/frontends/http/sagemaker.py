"""SageMaker's endpoints of several models: load, list, call and unload models that its agent puts on the disk.

https://docs.aws.amazon.com/sagemaker/latest/dg/mms-container-apis.html
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import ApiGroup
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from modelserver.frontends.http.json_body import with_object
from modelserver.frontends.http.relayed import RelayedExchange
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, error_response, json_response, message_response

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyControlPlane

logger = logging.getLogger(__name__)

# Has a model answer an exchange: the frontend's infer route.
Invoke = Callable[[HttpExchange, str], None]

_CONFLICT = 409
# This status tells SageMaker's agent to unload other models first.
_NO_MEMORY = 507
_OUT_OF_MEMORY = re.compile(
    rb"out[ _]of[ _]memory|MemoryError|OutOfMemory|\bOOM\b|allocate memory|No space left on device"
    rb"|CUBLAS_STATUS_ALLOC_FAILED|bad_alloc",
    re.IGNORECASE,
)


class MultiModel:
    """`/models` and the paths below it. Loads and unloads run as Tasks, which this object keeps alive."""

    def __init__(self, controlplane: AnyControlPlane, limits: HttpLimits, invoke: Invoke) -> None:
        self._controlplane = controlplane
        self._limits = limits
        self._invoke = invoke
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/models", self._list, ApiGroup.MODEL_REPOSITORY),
            Route("POST", "/models", self._load, ApiGroup.MODEL_REPOSITORY),
            Route("GET", "/models/{name}", self._show, ApiGroup.MODEL_REPOSITORY, model="name"),
            Route("DELETE", "/models/{name}", self._unload, ApiGroup.MODEL_REPOSITORY, model="name"),
            Route("POST", "/models/{name}/invoke", self._ask, ApiGroup.INFERENCE, model="name"),
        )

    def _list(self, exchange: HttpExchange) -> None:
        rows = [_document(name, url) for name, url in self._controlplane.archives().items()]
        exchange.respond(json_response({"models": rows}))

    def _show(self, exchange: HttpExchange, name: str) -> None:
        exchange.respond(json_response(_document(name, self._url(name))))

    def _load(self, exchange: HttpExchange) -> None:
        def submit(document: dict[str, Any]) -> None:
            name, url = (_text(document, key) for key in ("model_name", "url"))
            logger.info("SageMaker loads model '%s' (%s) from %s", name, _target(exchange, name), url)
            self._run(exchange, self._controlplane.add_archive(name, url))

        with_object(exchange, self._limits, submit)

    def _unload(self, exchange: HttpExchange, name: str) -> None:
        self._url(name)
        logger.info("SageMaker unloads model '%s' (%s)", name, _target(exchange, name))
        self._run(exchange, self._controlplane.remove_archive(name))

    def _ask(self, exchange: HttpExchange, name: str) -> None:
        self._url(name)
        self._invoke(_MemoryExchange(exchange), name)

    def _url(self, name: str) -> str:
        url = self._controlplane.archives().get(name)
        if url is None:
            raise NotFoundError(f"there is no model '{name:.200}': it was not loaded by POST /models")
        return url

    def _run(self, exchange: HttpExchange, operation: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_answer(_MemoryExchange(exchange), operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _MemoryExchange(RelayedExchange):
    """Answers that memory is short if an error says so."""

    __slots__ = ()

    def respond(self, response: HttpResponse) -> None:
        if response.status >= 400 and any(_OUT_OF_MEMORY.search(part) for part in response.body):
            response.status = _NO_MEMORY
        super().respond(response)


async def _answer(exchange: HttpExchange, operation: Coroutine[Any, Any, None]) -> None:
    try:
        await operation
        response = json_response({})
    except AlreadyExistsError as error:
        response = message_response(_CONFLICT, error.message)
    except Exception as error:
        response = error_response(error)
    exchange.respond(response)


def _document(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"'{key}': expected a string, got {type(value).__name__}")
    return value


def _target(exchange: HttpExchange, name: str) -> str:
    """The name that SageMaker's client uses for the model; the name here is a hash of it."""
    return exchange.head.headers.get("x-amzn-sagemaker-target-model", name)[:200]

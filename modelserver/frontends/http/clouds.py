"""The endpoints of SageMaker and Vertex AI, over the HTTP frontend: health, and inference of one model."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote, unquote

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import Guard, KeyUse
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, PermissionDeniedError
from modelserver.frontends.http.body import with_object
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.relayed import BinaryType, RelayedExchange, ReroutedExchange
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, error_response, json_response, message_response

logger = logging.getLogger(__name__)

SAGEMAKER_TYPE = BinaryType("application/vnd.sagemaker-triton.binary+json", is_answered=True)
VERTEX_AI_TYPE = BinaryType("application/vnd.vertex-ai-triton.binary+json", is_answered=False)
_REDIRECT = "x-vertex-ai-triton-redirect"
_READY = "/v2/health/ready"
# The calls of a model that SageMaker's /invocations can stand for; the first one is the default.
INFERENCE_TYPES = ("infer", "generate", "generate_stream")
# Methods that only read.
_READS = re.compile(r"/v2(/models(/[^/]+(/versions/[^/]+)?)?)?|.*/(ready|live|config|stats|status)")
# Calls that change the server: permission to predict does not allow them.
_CONTROLS = re.compile(
    r"/v2/(repository|systemsharedmemory|cudasharedmemory)/(.*/)?(load|unload|register|unregister)/*"
)


class Cloud:
    """`GET health_path` is readiness; `POST predict_path` asks `model`, or the only ready model.

    Each call becomes a call of the API `v2`. It was admitted at the cloud's own route; `guard` checks what the v2 route
    needs beyond that.
    """

    def __init__(
        self,
        v2: Api,
        guard: Guard,
        dataplane: AnyDataPlane,
        *,
        health_path: str,
        predict_path: str,
        model: str,
        model_source: str,
        binary_type: BinaryType,
        verb: str = INFERENCE_TYPES[0],
        has_redirect: bool = False,
    ) -> None:
        """`model_source` tells operators how to name it, `verb` is the model's path that predictions go to.

        With `has_redirect` a header may name another v2 path.
        """
        self._dataplane = dataplane
        health = Route("GET", health_path, self._health, ApiGroup.HEALTH, key=KeyUse.UNUSED)
        predict = Route("POST", predict_path, self._predict, ApiGroup.INFERENCE)
        self.routes = (health, predict)
        self._healthy = HttpFrontend([v2], guard.beyond(health.needs))
        self._predicting = HttpFrontend([v2], guard.beyond(predict.needs))
        self._model = model
        self._model_source = model_source
        self._binary_type = binary_type
        self._verb = verb
        self._has_redirect = has_redirect

    def _health(self, exchange: HttpExchange) -> None:
        self._forward(self._healthy, exchange, exchange.head.method, _READY)

    def _predict(self, exchange: HttpExchange) -> None:
        target = exchange.head.headers.get(_REDIRECT) if self._has_redirect else None
        if target is None:
            self._ask(exchange, self._only_model(), self._verb)
            return
        target = "/" + target.lstrip("/")
        if target != "/v2" and not target.startswith("/v2/"):
            raise InvalidArgumentError(f"the header {_REDIRECT} must name a path of v2, got '{target:.200}'")
        if _CONTROLS.fullmatch(unquote(target)):
            raise PermissionDeniedError(
                f"the header {_REDIRECT} does not reach '{target:.200}': models are loaded and unloaded, and shared "
                "memory is registered, on the server's own ports"
            )
        self._forward(self._predicting, exchange, self._method_of(target), target)

    def invoke(self, exchange: HttpExchange, model: str) -> None:
        """Have `model` answer."""
        self._ask(exchange, model, "infer")

    def _ask(self, exchange: HttpExchange, model: str, verb: str) -> None:
        self._forward(self._predicting, exchange, "POST", f"/v2/models/{quote(model, safe='')}/{verb}")

    def _only_model(self) -> str:
        if self._model:
            return self._model
        names = self._dataplane.model_names()
        if len(names) != 1:
            raise InvalidArgumentError(
                f"there are {len(names)} models that are ready: choose one with {self._model_source}"
            )
        return names[0]

    @staticmethod
    def _method_of(path: str) -> str:
        """The method of a redirected call: the cloud sends POST only, our routes that read want GET."""
        return "GET" if _READS.fullmatch(path.rstrip("/")) else "POST"

    def _forward(self, http: HttpFrontend, exchange: HttpExchange, method: str, path: str) -> None:
        http.handle(ReroutedExchange(exchange, method, path, self._binary_type))


def sagemaker_api(
    v2: Api,
    guard: Guard,
    dataplane: AnyDataPlane,
    controlplane: AnyControlPlane,
    limits: HttpLimits,
    *,
    model: str,
    inference_type: str,
    port: int,
) -> Api:
    """`/ping` and `/invocations`, and `/models` for endpoints of several models.

    `inference_type` is the v2 call that `/invocations` stands for. Raises InvalidArgumentError for an unknown one.
    """
    if inference_type not in INFERENCE_TYPES:
        raise InvalidArgumentError(
            f"SAGEMAKER_TRITON_INFERENCE_TYPE must be one of {', '.join(INFERENCE_TYPES)}, got '{inference_type:.40}'"
        )
    cloud = Cloud(
        v2,
        guard,
        dataplane,
        health_path="/ping",
        predict_path="/invocations",
        model=model,
        model_source="the environment variable SAGEMAKER_TRITON_DEFAULT_MODEL_NAME",
        binary_type=SAGEMAKER_TYPE,
        verb=inference_type,
    )
    return Api("SageMaker", (*cloud.routes, *MultiModel(controlplane, limits, cloud.invoke).routes()), port=port)


def vertex_ai_api(
    v2: Api, guard: Guard, dataplane: AnyDataPlane, *, health_path: str, predict_path: str, model: str, port: int
) -> Api:
    """The API of the paths that Vertex AI chooses."""
    cloud = Cloud(
        v2,
        guard,
        dataplane,
        health_path=health_path,
        predict_path=predict_path,
        model=model,
        model_source="--vertex-ai-default-model",
        binary_type=VERTEX_AI_TYPE,
        has_redirect=True,
    )
    return Api("Vertex AI", cloud.routes, port=port)


# SageMaker's endpoints of several models: load, list, call and unload models that its agent puts on the disk.
#
# https://docs.aws.amazon.com/sagemaker/latest/dg/mms-container-apis.html

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

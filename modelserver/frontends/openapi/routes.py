"""`/openapi.json` and `/docs`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from modelserver.auth.access import Access, ApiGroup
from modelserver.config.schema import ModelConfig
from modelserver.core.long_work import Slices, long_work
from modelserver.errors import ServerError
from modelserver.frontends.http.static_files import entity_tag, respond_unless_known, static_routes
from modelserver.frontends.openapi.document import Described
from modelserver.frontends.openapi.models import model_paths
from modelserver.protocol.api import Api, Route, RouteSchema
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import JSON_TYPE, HttpResponse, error_response

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane

_DIRECTORY = Path(__file__).with_name("static")
_INFER = ("POST", "/v2/models/{name}/infer")
# Models that are looked up before other events of the loop get their turn.
_MODELS_AT_ONCE = 64
# Models that were unloaded, or that other callers have, whose paths are remembered.
_MAX_KNOWN = 1024
_HEADERS = (JSON_TYPE, ("Cache-Control", "no-cache"))


@dataclass(frozen=True, slots=True)
class _Made:
    """A document. It holds as long as the configs are those of the models."""

    configs: Sequence[ModelConfig]
    body: tuple[bytes, ...]
    tag: str


@dataclass(frozen=True, slots=True)
class _Paths:
    """The paths of a model with that config, after a comma."""

    config: ModelConfig
    text: bytes
    digest: bytes


class OpenApi:
    """Serves the document of the APIs of a port, made when it is asked for. Event loop thread only."""

    def __init__(self, dataplane: AnyDataPlane, access: Access, *, has_keys: bool) -> None:
        self._dataplane = dataplane
        self._access = access
        self._has_keys = has_keys
        self._apis: Sequence[Api] = ()
        # The document without its models, up to the last brace of `paths`; and the paths of each model.
        self._head: bytes | None = None
        self._paths: dict[str, _Paths] = {}
        self._made: _Made | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # kept, because the event loop does not

    def api(self) -> Api:
        """The document, and the page that shows it."""
        document = Route("GET", "/openapi.json", self._answer, ApiGroup.METADATA)
        routes = (document, *static_routes("/docs", _DIRECTORY))
        schemas = {
            "GET /openapi.json": RouteSchema(answer="{openapi: string, info: object, paths: object, *: any}"),
            "GET /docs": RouteSchema(answer="string", media_type="text/html"),
        }
        return Api("docs", routes, beginnings=("/docs", "/openapi.json")).described(
            schemas, {"Error": "{error: string}"}
        )

    def describe(self, apis: Sequence[Api]) -> None:
        """Say which APIs the port has. Called once, before the first request."""
        self._apis = apis

    def _answer(self, exchange: HttpExchange) -> None:
        task = asyncio.get_running_loop().create_task(self._respond(exchange), name="openapi")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = task.cancel  # type: ignore[assignment]  # its result is ignored

    async def _respond(self, exchange: HttpExchange) -> None:
        try:
            made = await self._document()
        except Exception as error:
            exchange.on_disconnect = None
            exchange.respond(error_response(error))
            return
        exchange.on_disconnect = None
        respond_unless_known(exchange, HttpResponse(200, _HEADERS, made.body), made.tag)

    async def _document(self) -> _Made:
        configs = await self._configs()
        made = self._made
        if made is None or [*map(id, made.configs)] != [*map(id, configs)]:
            made = self._made = await long_work().run(self._slices(configs))
        return made

    async def _configs(self) -> list[ModelConfig]:
        """Of the caller's models that are ready, and of those that a request would load, as far as their configs say.

        A config stays the same object until it changes or its model is loaded again.
        """
        if all((route.method, route.pattern) != _INFER for api in self._apis for route in api.routes):
            return []
        found = []
        for number, name in enumerate(self._dataplane.model_names(), 1):
            if number % _MODELS_AT_ONCE == 0:
                await asyncio.sleep(0)
            with suppress(ServerError):  # unloaded meanwhile, or two of that name
                found.append(self._dataplane.model_config(name))
        ready = {config.name for config in found}
        for config in await self._dataplane.unloaded_configs():
            if config.name not in ready and all(each.data_type is not None for each in config.input):
                known = self._paths.get(config.name)
                found.append(known.config if known is not None and known.config == config else config)
        return found

    def _slices(self, configs: Sequence[ModelConfig]) -> Slices[_Made]:
        metadata = self._dataplane.server_metadata()
        described = Described(
            self._apis, self._access, has_keys=self._has_keys, name="modelserver", version=metadata.version
        )
        if self._head is None:
            # Without the braces that close `paths` and the document.
            self._head = orjson.dumps((yield from described.slices()))[:-2]
        infer = described.route(*_INFER)
        security = [] if infer is None else described.security(infer)
        if len(self._paths) > _MAX_KNOWN + len(configs):
            self._paths.clear()
        parts, digests = [self._head], [self._head]
        for start in range(0, len(configs), _MODELS_AT_ONCE):
            texts = []
            for config in configs[start : start + _MODELS_AT_ONCE]:
                known = self._paths.get(config.name)
                if known is None or known.config is not config:
                    text = b"," + model_paths(config, security)
                    known = self._paths[config.name] = _Paths(config, text, sha256(text).digest())
                    yield
                texts.append(known.text)
                digests.append(known.digest)
            parts.append(b"".join(texts))
            yield
        parts.append(b"}}")
        return _Made(configs, tuple(parts), entity_tag(*digests))

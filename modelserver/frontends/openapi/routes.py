"""`/openapi.json` and `/docs`: the OpenAPI document of APIs, first what does not depend on the models."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import orjson

from modelserver.auth.access import Access, ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.config.schema import ModelConfig
from modelserver.core.long_work import Slices, long_work
from modelserver.errors import ServerError
from modelserver.frontends.http.static_files import entity_tag, respond_unless_known, static_routes
from modelserver.frontends.openapi.models import TAG, model_paths
from modelserver.frontends.openapi.notation import Json, json_schema
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.api import Api, Route, RouteSchema, Schema, spelled_out
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import JSON_TYPE, HttpResponse, error_response

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


_ROUTES = Path(__file__).with_name("routes.toml")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_REMARK = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)")


def read_routes() -> dict[str, dict[str, str]]:
    """Section -> "METHOD pattern" -> what the route does, in Markdown; brackets hold optional parts."""
    return tomllib.loads(_ROUTES.read_text(encoding="utf-8"))


class Described:
    """APIs that are served together, behind `access`; with `has_keys` callers have API keys."""

    def __init__(self, apis: Sequence[Api], access: Access, *, has_keys: bool, name: str, version: str) -> None:
        self._apis = apis
        self._access = access
        self._has_keys = has_keys
        self._info = {
            "title": name,
            "version": version,
            "description": "All that this port serves. Each API has its own form of errors.",
        }

    def route(self, method: str, pattern: str) -> Route | None:
        """The route of that pattern, if it is served."""
        routes = (route for api in self._apis for route in api.routes)
        return next((each for each in routes if (each.method, each.pattern) == (method, pattern)), None)

    def slices(self) -> Slices[Json]:
        """The document; `paths` is its last member. Raises ValueError for a malformed schema of an API."""
        paths: Json = {}
        schemas: Json = {}
        for api in self._apis:
            for route in api.routes:
                paths.setdefault(route.pattern, {})[route.method.lower()] = self._operation(api, route)
                yield
            schemas |= {f"{_component(api)}.{name}": _schema(api, schema) for name, schema in api.types.items()}
            yield
        return {
            "openapi": "3.1.0",
            "info": self._info,
            # The directory of this document.
            "servers": [{"url": "."}],
            "tags": [{"name": api.name} for api in self._apis] + [{"name": TAG}],
            "components": {
                "schemas": schemas,
                "responses": {
                    f"{_component(api)}.Error": {
                        "description": "The request failed",
                        "content": _content(api, "application/json", "Error"),
                    }
                    for api in self._apis
                    if "Error" in api.types
                },
                "securitySchemes": self._schemes(),
            },
            "paths": paths,
        }

    def security(self, route: Route) -> list[dict[str, list[str]]]:
        """What a caller must send, in alternatives; empty for nothing."""
        restriction = self._access.restriction(route.group)
        secret: dict[str, list[str]] = {} if restriction is None else {_restricted(restriction.key): []}
        if not self._has_keys or route.key is KeyUse.UNUSED:
            return [secret] if secret else []
        scopes = [route.needs.scope.value]
        found = [{"key": scopes, **secret}, {"x-api-key": scopes, **secret}]
        return [*found, secret] if route.key is KeyUse.OPTIONAL else found

    def _schemes(self) -> Json:
        found: Json = {
            _restricted(rule.key): {
                "type": "apiKey",
                "in": "header",
                "name": rule.key,
                "description": f"The operator's secret for {', '.join(group.value for group in rule.groups)}",
            }
            for rule in self._access.restrictions
        }
        if self._has_keys:
            found["key"] = {"type": "http", "scheme": "bearer", "description": "An API key of this server"}
            found["x-api-key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        return found

    def _operation(self, api: Api, route: Route) -> Json:
        schema = route.schema
        summary = schema.summary or _summaries().get(f"{route.method} {route.pattern}", "")
        operation: Json = {
            "operationId": f"{api.name} {route.method} {route.pattern}",
            "tags": [api.name],
            "summary": summary,
            "parameters": _parameters(api, route),
            "responses": {"200": _success(api, route)},
        }
        if schema.body:
            is_needed = bool(_schema(api, schema.body).get("required", True))
            operation["requestBody"] = {
                "required": is_needed,
                "content": _content(api, schema.body_type, schema.body),
            }
        # Health says all by its status; other routes fail in the form of their API.
        is_bare = route.key is KeyUse.UNUSED and not schema.answer
        if "Error" in api.types and not is_bare:
            operation["responses"]["default"] = {"$ref": f"#/components/responses/{_component(api)}.Error"}
        else:
            operation["responses"]["default"] = {"description": "The request failed"}
        security = self.security(route)
        return {**operation, "security": security} if security else operation


def _success(api: Api, route: Route) -> Json:
    schema = route.schema
    content: Json = {}
    if schema.answer:
        content |= _content(api, schema.media_type, schema.answer)
    if schema.event:
        # A schema would be of the stream as a whole.
        content[schema.stream_type.partition(";")[0]] = {"x-event": _schema(api, schema.event)}
    response: Json = {"description": "Success"}
    return {**response, "content": content} if content else response


def _parameters(api: Api, route: Route) -> list[Json]:
    names = re.findall(r"{(\w+)}", route.pattern)
    found: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    if route.schema.query:
        query = _schema(api, route.schema.query)
        needed = query.get("required", ())
        found += [
            {"name": name, "in": "query", "required": name in needed, "schema": _without_null(schema)}
            for name, schema in query["properties"].items()
        ]
    return found


def _without_null(schema: Json) -> Json:
    """A value of a query: there or not, but never null."""
    if isinstance(schema.get("type"), list):
        return {**schema, "type": next(each for each in schema["type"] if each != "null")}
    if "enum" in schema:
        return {"enum": [each for each in schema["enum"] if each is not None]}
    return schema


def _content(api: Api, media_type: str, schema: Schema) -> Json:
    return {media_type: {"schema": _schema(api, schema)}}


def _schema(api: Api, schema: Schema) -> Json:
    return json_schema(schema, f"#/components/schemas/{_component(api)}.")


def _component(api: Api) -> str:
    """The API's name as the names of components have it."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", api.name)


def _restricted(header: str) -> str:
    return f"restricted-{header}"


@lru_cache(maxsize=1)
def _summaries() -> dict[str, str]:
    """What our own routes do, as plain text."""
    return {
        route: _LINK.sub(r"\1", _REMARK.sub("", text))
        for section in read_routes().values()
        for key, text in section.items()
        for route in spelled_out(key)
    }

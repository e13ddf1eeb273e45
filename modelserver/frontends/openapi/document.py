"""The OpenAPI document of APIs: what does not depend on the models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from modelserver.auth.access import Access
from modelserver.auth.guard import KeyUse
from modelserver.core.long_work import Slices
from modelserver.frontends.openapi.models import TAG
from modelserver.frontends.openapi.notation import Json, json_schema
from modelserver.protocol.api import Api, Route, Schema, spelled_out

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

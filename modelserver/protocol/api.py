"""A family of HTTP calls as data: its routes, the requirements of each, and the form of its errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelserver.auth.access import ApiGroup
from modelserver.auth.api_keys import Scope
from modelserver.auth.guard import KeyUse, Needs
from modelserver.protocol.response import PLAIN_ERRORS, ErrorWriter

# A handler is called with the exchange and the values of the pattern's `{name}` segments.
RouteCall = Callable[..., None]
# A JSON Schema, or its short form (docs/add-an-api.md), such as "{rows: [[number]], name?: string}".
Schema = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RouteSchema:
    """The documents of a route, for `/openapi.json`; "" stands for none.

    `body` is the request's, of the type `body_type`, `answer` the answer's of the type `media_type`. A streamed answer
    is of the type `stream_type`, and each of its documents is `event`. `query` is an object whose members are the
    query's. `summary` says in one line what the route does.
    """

    summary: str = ""
    body: Schema = ""
    answer: Schema = ""
    event: Schema = ""
    query: Schema = ""
    media_type: str = "application/json"
    stream_type: str = "text/event-stream"
    body_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """One call of an API, such as `Route("GET", "/v2/models/{name}", call, ApiGroup.METADATA, model="name")`.

    `group` is the operator's word for calls that are restricted together. `scope` is the scope that an API key must
    have; without one, it is the usual scope of the group. `key` says whether a key is needed at all. `model` is the
    segment that names the model; it is empty if the body names it, or if the call is not about a model: then the planes
    check the key's models. `schema` has the documents of the call. `take_body` is given a pipe, for the body of a
    request that does not arrive at once, and the values of the pattern's segments: it starts a thread that takes the
    body. The handler finds the pipe in the body then, which is a `PipedBody`, and finishes it.
    """

    method: str
    pattern: str
    call: RouteCall
    group: ApiGroup
    scope: Scope | None = None
    key: KeyUse = KeyUse.NEEDED
    model: str = ""
    take_body: RouteCall | None = None
    schema: RouteSchema = field(default=RouteSchema(), compare=False)
    needs: Needs = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", Needs.of(self.group, self.scope, self.key))


@dataclass(frozen=True, slots=True)
class Api:
    """A family of calls: `name`, for messages and flags, its routes, and the form of its errors.

    Unknown paths below one of `beginnings`, such as "/v2", are answered in this API's form; so is a known path with
    another method. An API with a `port` is served only there; port 0 takes a free one. There it also has its
    `own_routes`, whose paths belong to other APIs on a shared port.

    Schemas of routes refer to `types` by their names; the type `Error` is the document of errors.
    """

    name: str
    routes: tuple[Route, ...]
    errors: ErrorWriter = PLAIN_ERRORS
    port: int | None = None
    beginnings: tuple[str, ...] = ()
    own_routes: tuple[Route, ...] = ()
    types: Mapping[str, Schema] = field(default_factory=dict, compare=False)

    def on_port(self, port: int) -> Api:
        """The same on a port of its own."""
        return replace(self, port=port, routes=self.routes + self.own_routes, own_routes=())

    def without(self, others: tuple[Route, ...]) -> Api:
        """The same without the calls that are among `others`, to be served beside them."""
        taken = {(route.method, route.pattern) for route in others}
        return replace(self, routes=tuple(each for each in self.routes if (each.method, each.pattern) not in taken))

    def described(self, schemas: Mapping[str, RouteSchema], types: Mapping[str, Schema]) -> Api:
        """The same with the schemas of its routes, by "METHOD pattern" as `spelled_out` takes it."""
        known = {route: schema for key, schema in schemas.items() for route in spelled_out(key)}

        def with_schemas(routes: tuple[Route, ...]) -> tuple[Route, ...]:
            return tuple(
                replace(each, schema=known.get(f"{each.method} {each.pattern}", each.schema)) for each in routes
            )

        return replace(self, routes=with_schemas(self.routes), own_routes=with_schemas(self.own_routes), types=types)


def spelled_out(key: str) -> list[str]:
    """The routes that a key such as "GET /v2[/models/{name}]" stands for: with and without each part in brackets."""
    parts = re.split(r"\[(.*?)\]", key)
    choices = [(part,) if index % 2 == 0 else ("", part) for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]

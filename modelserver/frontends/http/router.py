"""Path and method -> route, by one table of patterns compiled into a tree. Does not know the handlers.

Paths are matched as they came, segment by segment, and each segment is decoded by itself: an encoded slash is a part of
a name and never separates segments, as for a proxy that stands before us and has rules for paths.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from modelserver.auth.access import ApiGroup
from modelserver.protocol.http_status import PLAIN_ERRORS
from modelserver.protocol.response import ErrorWriter

# A handler is called with the exchange and the values of the pattern's `{name}` segments.
RouteCall = Callable[..., None]
Arguments = dict[str, str]

_RECENT_PATHS = 1024
_MAX_PATH_LEN = 2048
_MAX_HINT_LEN = 200  # a nearest route is looked for only when the path is not absurdly long


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of the table, such as `Route("GET", "/v2/models/{name}", call, ApiGroup.METADATA)`.

    `group` says what a caller needs: a header, where the operator restricts the group, and the scope of a key, where
    there are keys. A route that `is_open` needs no key: load balancers ask it.
    """

    method: str
    pattern: str
    call: RouteCall
    group: ApiGroup
    is_open: bool = False

    def calling(self, call: RouteCall) -> Route:
        """The same route with another call, such as one that looks at something first."""
        return replace(self, call=call)


@dataclass(frozen=True, slots=True)
class Api:
    """A family of calls as data: `name`, for messages, its routes, and the form of its errors.

    Nothing tells an API by the beginning of a path: what a call needs is on its route, and how its errors look is said
    by the API whose pattern the path matches.
    """

    name: str
    routes: tuple[Route, ...]
    errors: ErrorWriter = PLAIN_ERRORS


class Match(NamedTuple):
    """What a path leads to: the routes by method, the values in the path, and the API that they are of."""

    routes: Mapping[str, Route]
    arguments: Arguments
    api: Api


@dataclass(slots=True)
class _Node:
    """One segment of the patterns. Literal children win over `{name}`, which wins over nothing."""

    literals: dict[str, _Node] = field(default_factory=dict)
    variable: _Node | None = None
    variable_name: str = ""
    routes: dict[str, Route] = field(default_factory=dict)
    api: Api | None = None


class Router:
    """Finds the route of a request. Trailing slashes do not count; HEAD is served where GET is."""

    def __init__(self, apis: tuple[Api, ...]) -> None:
        """The first API that has a pattern owns its path, and the first that has a beginning unknown paths below it."""
        self.apis = apis
        self.routes = tuple(route for api in apis for route in api.routes)
        self._root = _Node()
        self._owners: dict[str, Api] = {}
        # The same few paths come all the time; the infer path is found here by one look-up.
        self._recent = lru_cache(maxsize=_RECENT_PATHS)(self._search)
        self._patterns = sorted({route.pattern for route in self.routes})
        for api in apis:
            for route in api.routes:
                self._add(api, route)

    def _add(self, api: Api, route: Route) -> None:
        node = self._root
        segments = route.pattern.strip("/").split("/")
        self._owners.setdefault(segments[0], api)
        for segment in segments:
            if not segment.startswith("{"):
                node = node.literals.setdefault(segment, _Node())
                continue
            if node.variable is None:
                node.variable, node.variable_name = _Node(), segment[1:-1]
            assert node.variable_name == segment[1:-1], f"{route.pattern}: two names for one segment"
            node = node.variable
        assert route.method not in node.routes, f"{route.method} {route.pattern}: the route is there twice"
        node.routes[route.method] = route
        node.api = node.api or api

    def find(self, path: str) -> Match | None:
        """The routes by method that serve `path`, not decoded, and the values in it; None when no pattern matches."""
        return self._recent(path) if len(path) <= _MAX_PATH_LEN else None

    def api(self, path: str) -> Api:
        """The API that a path belongs to: by its pattern, else by its first segment, else the first of all."""
        found = self.find(path)
        if found is not None:
            return found.api
        return self._owners.get(path.strip("/").split("/")[0], self.apis[0])

    def route(self, method: str, path: str) -> Route | None:
        """The one route for a request; None where there is none."""
        found = self.find(path)
        return None if found is None else route_for(found.routes, method)

    def _search(self, path: str) -> Match | None:
        segments = path.removesuffix("/").split("/")[1:]
        if "%" in path:
            segments = [unquote(segment) for segment in segments]
        return _find(self._root, segments, 0)

    def nearest(self, path: str) -> str | None:
        """The path that `path` may have meant, for an error message: one of the same API, with the same names in it.

        Corrects a path without the API's prefix, or with the prefix twice.
        """
        if len(path) > _MAX_HINT_LEN:
            return None
        segments = path.strip("/").split("/")
        start = segments[0]
        if start not in self._root.literals:
            return next((found for root in self._root.literals if self.find(found := f"/{root}{path}")), None)
        if segments[1:2] == [start] and self.find("/" + "/".join(segments[1:])):
            return "/" + "/".join(segments[1:])
        known = [pattern for pattern in self._patterns if pattern.startswith(f"/{start}/")]
        named = [_with_names(pattern, segments) for pattern in known]
        # The start that all of them share says nothing.
        rests = difflib.get_close_matches(path[len(start) + 2 :], [each[len(start) + 2 :] for each in named], n=1)
        return f"/{start}/{rests[0]}" if rests else None

    def starts(self, path: str) -> list[str]:
        """How paths of the API that `path` belongs to begin, or, if there is none, how those of all APIs do."""
        patterns = [pattern.strip("/").split("/") for pattern in self._patterns]
        start = path.strip("/").split("/")[0]
        within = {f"/{start}/{each[1]}" for each in patterns if each[0] == start and len(each) > 1}
        return sorted(within or {f"/{each[0]}" for each in patterns})


def _with_names(pattern: str, segments: list[str]) -> str:
    """The pattern with the segments of a path in place of its variables, where the path has them."""
    own = pattern.strip("/").split("/")
    pairs = itertools.zip_longest(own, segments[: len(own)], fillvalue="")
    return "/" + "/".join(given or one if one.startswith("{") else one for one, given in pairs)


def allowed_methods(routes: Mapping[str, Route]) -> list[str]:
    """The methods of a path as the Allow header lists them."""
    methods = set(routes)
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods)


def route_for(routes: Mapping[str, Route], method: str) -> Route | None:
    """The route that serves `method`; the wire drops the body of an answer to HEAD."""
    return routes.get("GET" if method == "HEAD" else method)


def _find(node: _Node, segments: list[str], index: int) -> Match | None:
    if index == len(segments):
        return None if node.api is None else Match(node.routes, {}, node.api)
    segment = segments[index]
    literal = node.literals.get(segment)
    if literal is not None:
        found = _find(literal, segments, index + 1)
        if found is not None:
            return found
    if node.variable is None or not segment:
        return None
    found = _find(node.variable, segments, index + 1)
    if found is not None:
        found.arguments[node.variable_name] = segment
    return found

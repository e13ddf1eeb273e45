"""Path and method -> route, by one table of patterns compiled into a tree. Does not know the handlers.

Paths are matched as they were sent, segment by segment, and each segment is decoded by itself: an encoded slash is part
of a name and never separates segments, as for a proxy in front of us that has rules for paths.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from modelserver.errors import InvalidArgumentError
from modelserver.protocol.api import Api, Route

Arguments = dict[str, str]

_RECENT_PATHS = 1024
_MAX_PATH_LEN = 2048
_MAX_HINT_LEN = 200  # no nearest route is searched for a longer path


class Match(NamedTuple):
    """The match of a path: the routes by method, the values in the path, and the API that the path belongs to."""

    routes: Mapping[str, Route]
    arguments: Arguments
    api: Api


@dataclass(slots=True)
class _Node:
    """One segment of the patterns. Literal children win over `{name}:verb`, that over `{name}`, that over nothing."""

    literals: dict[str, _Node] = field(default_factory=dict)
    variable: _Node | None = None
    variable_name: str = ""
    verbs: dict[str, _Node] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    api: Api | None = None


class Router:
    """Finds the route of a request. Trailing slashes do not count; HEAD is served where GET is."""

    def __init__(self, apis: Sequence[Api]) -> None:
        """If several APIs have a path, the first one answers for it when no route matches.

        Raises InvalidArgumentError when two APIs have the same route.
        """
        assert apis, "a port serves at least one API"
        self.apis = tuple(apis)
        self.routes = tuple(route for api in apis for route in api.routes)
        self._root = _Node()
        # The longest beginning wins; of equal ones the first.
        # Of equal ones the last: installed APIs come after our own.
        self._beginnings = sorted(
            ((beginning.rstrip("/") + "/", api) for api in reversed(apis) for beginning in api.beginnings),
            key=lambda entry: -len(entry[0]),
        )
        # The same few paths come all the time; the infer path is found here by one look-up.
        self._recent = lru_cache(maxsize=_RECENT_PATHS)(self._search)
        for api in apis:
            for route in api.routes:
                self._add(api, route)

    def _add(self, api: Api, route: Route) -> None:
        node = self._root
        for segment in route.pattern.strip("/").split("/") if route.pattern != "/" else ():
            if not segment.startswith("{"):
                node = node.literals.setdefault(segment, _Node())
                continue
            name, _, verb = segment[1:].partition("}")
            if verb:
                node = node.verbs.setdefault(verb, _Node(variable_name=name))
                continue
            if node.variable is None:
                node.variable, node.variable_name = _Node(), name
            if node.variable_name != name:
                raise InvalidArgumentError(
                    f"the API '{api.name}' calls a segment of {route.pattern} '{name}', which another route calls "
                    f"'{node.variable_name}': use that name"
                )
            node = node.variable
        if route.method in node.routes:
            assert node.api is not None, "a node with routes has an API"
            raise InvalidArgumentError(
                f"the route {route.method} {route.pattern} is there twice: of the API '{node.api.name}', and of "
                f"'{api.name}'"
            )
        node.routes[route.method] = route
        node.api = node.api or api

    def find(self, path: str) -> Match | None:
        """The routes by method that serve `path`, not decoded, and the values in it; None when no pattern matches."""
        return self._recent(path) if len(path) <= _MAX_PATH_LEN else None

    def api(self, path: str) -> Api:
        """The API that answers for a path: that of its pattern, else of its beginning, else the first of all."""
        found = self.find(path)
        return found.api if found is not None else self._owner(path) or self.apis[0]

    def route(self, method: str, path: str) -> tuple[Route, Arguments] | None:
        """The route for a request, and the values in its path; None if there is no route."""
        found = self.find(path)
        route = None if found is None else route_for(found.routes, method)
        return None if found is None or route is None else (route, found.arguments)

    def _search(self, path: str) -> Match | None:
        if not path.startswith("/"):  # OPTIONS may ask about "*"
            return None
        segments = path.removesuffix("/").split("/")[1:]
        if "%" in path:
            segments = [unquote(segment) for segment in segments]
        return _find(self._root, segments, 0)

    def _owner(self, path: str) -> Api | None:
        """The API that declares the beginning of a path."""
        return next((api for beginning, api in self._beginnings if f"{path}/".startswith(beginning)), None)

    def nearest(self, path: str) -> str | None:
        """The path that `path` may have meant, for an error message: of the same API, and with the same names in it.

        Corrects a path without its API's beginning, with one too many, another version, or too much behind it.
        """
        if len(path) > _MAX_HINT_LEN or not path.strip("/"):
            return None
        start, api = next((entry for entry in self._beginnings if f"{path}/".startswith(entry[0])), ("/", None))
        rest = path[len(start) :]
        if rest and api is not None and self.find(f"/{rest}"):
            return f"/{rest}"
        elsewhere = next(
            (found for each, _ in self._beginnings if self._is_named(found := each[:-1] + path, path)), None
        )
        if api is None:
            return elsewhere or _closest(path, self.routes, start="/", cutoff=0.8)
        known = [route for route in api.routes if route.pattern.startswith(start)]
        if not known and elsewhere is None and self.find(start[:-1]):
            return start[:-1]
        return _closest(path, known, start=start, cutoff=0.6) or elsewhere

    def _is_named(self, path: str, asked: str) -> bool:
        """Whether there is a route for `path` whose pattern, and not a variable of it, has what `asked` begins with."""
        match = self.find(path)
        first = asked.strip("/").partition("/")[0]
        return match is not None and any(first in route.pattern.split("/") for route in match.routes.values())

    def starts(self, path: str) -> list[str]:
        """The beginnings of paths that this port serves: those of the API that `path` belongs to, or else of all."""
        start, api = next((entry for entry in self._beginnings if f"{path}/".startswith(entry[0])), ("/", None))
        found = self.routes if api is None else api.routes
        # An API may have a few paths below another beginning.
        found = tuple(route for route in found if f"{route.pattern}/".startswith(start)) or found
        patterns = [route.pattern.strip("/").split("/") for route in found]
        if api is None:
            return sorted({f"/{each[0]}" for each in patterns if each[0]})
        return sorted({"/" + "/".join(each[:2]) for each in patterns if len(each) > 1}) or [f"/{patterns[0][0]}"]


def _closest(path: str, routes: Sequence[Route], *, start: str, cutoff: float) -> str | None:
    """The route most like the path; what both have at their start carries no information."""
    segments = path.strip("/").split("/")
    rests = [_with_names(pattern, segments)[len(start) :] for pattern in sorted({route.pattern for route in routes})]
    close = difflib.get_close_matches(path[len(start) :], rests, n=1, cutoff=cutoff)
    return start + close[0] if close else None


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
    return routes.get(method) or (routes.get("GET") if method == "HEAD" else None)


def _find(node: _Node, segments: list[str], index: int) -> Match | None:
    if index == len(segments):
        return None if node.api is None else Match(node.routes, {}, node.api)
    segment = segments[index]
    literal = node.literals.get(segment)
    if literal is not None:
        found = _find(literal, segments, index + 1)
        if found is not None:
            return found
    for verb, child in node.verbs.items():
        if segment.endswith(verb) and len(segment) > len(verb):
            found = _find(child, segments, index + 1)
            if found is not None:
                found.arguments[child.variable_name] = segment.removesuffix(verb)
                return found
    if node.variable is None or not segment:
        return None
    found = _find(node.variable, segments, index + 1)
    if found is not None:
        found.arguments[node.variable_name] = segment
    return found

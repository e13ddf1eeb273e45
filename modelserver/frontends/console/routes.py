"""`/console`: static pages that call the server's other APIs from the browser, with the key that their user types."""

from __future__ import annotations

from pathlib import Path

from modelserver.frontends.http.static_files import CONTENT_TYPES, static_routes
from modelserver.protocol.api import Api, RouteSchema

CONSOLE = "console"


def console_api() -> Api:
    """The page and its files, which need no key and hold no secrets."""
    path = f"/{CONSOLE}"
    routes = static_routes(path, Path(__file__).parent / "static")
    schemas = {
        f"GET {route.pattern}": RouteSchema(
            summary="The console" if route.pattern == path else "A file of the console",
            answer="string",
            media_type=CONTENT_TYPES.get(Path(route.pattern).suffix, "text/html").partition(";")[0],
        )
        for route in routes
    }
    return Api(CONSOLE, routes, beginnings=(path,)).described(schemas, {"Error": "{error: string}"})

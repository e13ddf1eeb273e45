"""Calls from web pages of other origins (CORS): which pages may make them, and which headers they may read.

A browser asks before such a call, by OPTIONS and without a key. These preflights are answered here, before keys are
checked; the call itself needs its key as any other. `PageGuard` refuses calls that a browser makes without asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from modelserver.auth.access import WITHOUT_KEY, Admitted, Cors
from modelserver.errors import PermissionDeniedError
from modelserver.frontends.http.relayed import RelayedExchange
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.response import ErrorWriter, HttpResponse, message_response

_METHODS: Final = "GET, HEAD, POST, DELETE"
# Headers that a page may read beside those that every page may.
_EXPOSED: Final = "Inference-Header-Content-Length, Retry-After, endpoint-load-metrics"
_MAX_AGE_S: Final = 600
# Calls that change nothing. Other pages cannot read their answers.
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_HEADERS: Final = "Authorization, Content-Type"
_ASKED_METHOD: Final = "access-control-request-method"
_ASKED_HEADERS: Final = "access-control-request-headers"


def with_cors(frontend: HttpHandler, rules: Cors) -> HttpHandler:
    """The frontend, open to web pages of these origins, if any."""
    return CorsFrontend(frontend, rules) if rules.origins else frontend


class CorsFrontend(HttpHandler):
    """Stands before a frontend. Calls from outside web pages have no Origin, and pass unchanged."""

    def __init__(self, frontend: HttpHandler, rules: Cors) -> None:
        self._frontend = frontend
        self._rules = rules

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        origin = head.headers.get("origin")
        if origin is None:
            self._frontend.handle(exchange)
            return
        allowed = self._rules.allowed(origin)
        if _is_preflight(head):
            exchange.respond(self._preflight(origin, allowed, head.headers.get(_ASKED_HEADERS)))
        else:
            self._frontend.handle(_CorsExchange(exchange, self._readable(allowed)))

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """The page can read a refusal, like any answer."""
        origin = head.headers.get("origin")
        if origin is not None and _is_preflight(head):
            return WITHOUT_KEY
        checked = self._frontend.check_head(head, peer)
        if origin is not None and isinstance(checked, HttpResponse):
            checked.headers = [*checked.headers, *self._readable(self._rules.allowed(origin))]
        return checked

    def errors(self, path: str) -> ErrorWriter:
        return self._frontend.errors(path)

    def _preflight(self, origin: str, allowed: str | None, asked_headers: str | None) -> HttpResponse:
        if allowed is None:
            message = f"pages of {origin:.200} may not call this server; --http-cors-origin says which ones may"
            response = message_response(403, message)
            response.headers = (*response.headers, ("Vary", "Origin"))
            return response
        return HttpResponse(
            204,
            (
                *self._granted(allowed),
                ("Access-Control-Allow-Methods", _METHODS),
                ("Access-Control-Allow-Headers", asked_headers or _DEFAULT_HEADERS),
                ("Access-Control-Max-Age", str(_MAX_AGE_S)),
                ("Vary", f"Origin, {_ASKED_METHOD}, {_ASKED_HEADERS}"),
            ),
        )

    def _readable(self, allowed: str | None) -> list[tuple[str, str]]:
        """The headers that say whether a page may read an answer; caches must not give one page's answer to another."""
        vary = ("Vary", "Origin")
        if allowed is None:
            return [vary]
        return [*self._granted(allowed), ("Access-Control-Expose-Headers", _EXPOSED), vary]

    def _granted(self, allowed: str) -> list[tuple[str, str]]:
        granted = [("Access-Control-Allow-Origin", allowed)]
        if self._rules.allows_credentials:
            granted.append(("Access-Control-Allow-Credentials", "true"))
        return granted


def _is_preflight(head: HttpHead) -> bool:
    return head.method == "OPTIONS" and _ASKED_METHOD in head.headers


class _CorsExchange(RelayedExchange):
    """An exchange whose answer has further headers."""

    __slots__ = ("_more",)

    def __init__(self, exchange: HttpExchange, more: list[tuple[str, str]]) -> None:
        super().__init__(exchange)
        self._more = more

    def change(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [*headers, *self._more]


class PageGuard:
    """Refuses calls that a browser makes for a page of another origin, unless the operator allows that origin.

    A page can make some calls without a preflight, and change the server without reading the answer. Browsers say which
    page a call is for (`Sec-Fetch-Site`, which no page can set) where they trust the connection: over TLS and to this
    machine. Elsewhere they say nothing. Then a page whose own name was made to resolve to this machine (DNS
    rebinding) looks like one of ours, but for the name in `Host`.
    """

    def __init__(self, rules: Cors) -> None:
        self._rules = rules

    def check(self, head: HttpHead) -> None:
        """Raises PermissionDeniedError."""
        headers = head.headers
        site = headers.get("sec-fetch-site")
        if site is not None:
            is_foreign = site not in ("same-origin", "none") and head.method not in _READING
        else:
            is_foreign = self._rules.is_local and _is_page(headers) and not _is_own_name(headers.get("host", ""))
        if is_foreign and self._rules.allowed(headers.get("origin", "")) is None:
            page = headers.get("origin") or headers.get("host", "")
            raise PermissionDeniedError(
                f"pages of {page:.200} may not make this call; --http-cors-origin says which ones may"
            )


def _is_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends it, over a connection that the browser does not trust: Sec-Fetch-Mode is never forged."""
    return ("origin" in headers or "accept-language" in headers) and "sec-fetch-mode" not in headers


def _is_own_name(host: str) -> bool:
    """Whether it is an address or a name of localhost, and so not the name of a page that resolves to this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if not name or name == "localhost" or name.endswith(".localhost"):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True

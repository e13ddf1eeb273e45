"""HTTP where API keys are set: every path needs a key but those that say whether the server lives and is ready.

Known paths need a scope, too; unknown ones are not told apart from those without a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from modelserver.api_keys import CALLER, SCOPE_OF, ApiKey, KeyRing, Scope
from modelserver.errors import ModelAsleepError, ServerError
from modelserver.frontends.http.exchange import Frontend, HttpExchange, HttpHead, HttpResponse
from modelserver.frontends.http.limits import HttpLimits
from modelserver.frontends.http.restricted import group_of
from modelserver.frontends.http.router import Route, RouteCall
from modelserver.frontends.http.routes import HttpFrontend
from modelserver.frontends.openai import errors as openai_errors
from modelserver.keyed_planes import check_scope, keyed_planes

if TYPE_CHECKING:
    from modelserver.controlplane import AnyControlPlane
    from modelserver.dataplane import AnyDataPlane

# What load balancers ask, who have no key: whether the server lives, and is ready; nothing of a model.
OPEN_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready", "/health", "/ping"})


def http_frontend(
    dataplane: AnyDataPlane,
    controlplane: AnyControlPlane,
    limits: HttpLimits,
    keys: KeyRing | None,
    metrics: Frontend | None = None,
) -> HttpFrontend:
    """The frontend that these keys ask for; without any, nothing stands before a request."""
    if keys is None:
        return HttpFrontend(dataplane, controlplane, limits, metrics)
    return KeyedHttpFrontend(dataplane, controlplane, limits, keys, metrics)


class KeyedHttpFrontend(HttpFrontend):
    """Answers those who have a key for what they ask."""

    def __init__(
        self,
        dataplane: AnyDataPlane,
        controlplane: AnyControlPlane,
        limits: HttpLimits,
        keys: KeyRing,
        metrics: Frontend | None = None,
    ) -> None:
        super().__init__(*keyed_planes(dataplane, controlplane, keys), limits, metrics)
        self._keys = keys
        # Heads that were read before are answered without the router.
        self._answer_infer = _scoped(self._answer_infer, Scope.INFER)

    def handle(self, exchange: HttpExchange) -> None:
        head = exchange.head
        try:
            caller = None if head.path.rstrip("/") in OPEN_PATHS else self._keys.caller(head.headers)
        except ServerError as error:
            exchange.respond(_refusal(error, head))
            return
        _as_caller(caller, super().handle, exchange)

    def _guard(self, route: Route) -> Route:
        if route.pattern in OPEN_PATHS:
            return route
        return Route(route.method, route.pattern, _answering(_scoped(route.call, SCOPE_OF[group_of(route.pattern)])))


class KeyedFrontend:
    """Another frontend, such as that of the metrics, behind keys. `scope_of` says what a path needs.

    A path of no scope needs no key; what a rerouted request needs, its own frontend sees to.
    """

    def __init__(self, frontend: Frontend, keys: KeyRing, scope_of: Callable[[str], Scope | None]) -> None:
        self._frontend = frontend
        self._keys = keys
        self._scope_of = scope_of

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        caller = None
        try:
            scope = self._scope_of(head.path.rstrip("/"))
            if scope is not None:
                caller = self._keys.caller(head.headers)
                _check_scope(caller, scope, head)
        except ServerError as error:
            exchange.respond(_refusal(error, head))
            return
        _as_caller(caller, self._frontend.handle, exchange)


def keyed_metrics(frontend: Frontend, keys: KeyRing | None) -> Frontend:
    """The metrics, for keys of that scope."""
    return frontend if keys is None else KeyedFrontend(frontend, keys, lambda _: Scope.METRICS)


def keyed_cloud(frontend: Frontend, keys: KeyRing | None, health_path: str) -> Frontend:
    """The endpoints of a cloud: its health needs no key, control of models the scope admin, all else infer."""
    if keys is None:
        return frontend

    def scope_of(path: str) -> Scope | None:
        if path == health_path:
            return None
        is_control = path == "/models" or (path.startswith("/models/") and not path.endswith("/invoke"))
        return Scope.ADMIN if is_control else Scope.INFER

    return KeyedFrontend(frontend, keys, scope_of)


def _as_caller(caller: ApiKey | None, handle: Callable[[HttpExchange], None], exchange: HttpExchange) -> None:
    """What `handle` starts, Tasks and callbacks, has this caller too."""
    token = CALLER.set(caller)
    try:
        handle(exchange)
    finally:
        CALLER.reset(token)


def _check_scope(caller: ApiKey, scope: Scope, head: HttpHead) -> None:
    if scope not in caller.scopes:  # asked here first: what was called is put into words for a refusal only
        check_scope(caller, scope, f"{head.method} {head.path}")


def _scoped(call: RouteCall, scope: Scope) -> RouteCall:
    def check(exchange: HttpExchange, *arguments: Any, **named: str) -> None:
        caller = CALLER.get()
        assert caller is not None, "nothing is routed without a caller"
        _check_scope(caller, scope, exchange.head)
        call(exchange, *arguments, **named)

    return check


def _answering(call: RouteCall) -> RouteCall:
    """Answers what the scope says in the words of the API that is asked."""

    def answer(exchange: HttpExchange, **named: str) -> None:
        try:
            call(exchange, **named)
        except ModelAsleepError:
            raise  # the exchange is handled again when the model is there
        except ServerError as error:
            exchange.respond(_refusal(error, exchange.head))

    return answer


def _refusal(error: ServerError, head: HttpHead) -> HttpResponse:
    response = openai_errors.error_at(head.path, error)
    if response.status == 401:
        response.headers = [*response.headers, ("WWW-Authenticate", "Bearer")]
    return response

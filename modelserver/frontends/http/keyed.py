"""HTTP where API keys are set: every path needs a key but those that say whether the server lives and is ready.

Known paths need a scope, too; unknown ones are not told apart from those without a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import WITHOUT_KEY, Admitted, ApiGroup
from modelserver.auth.api_keys import CALLER, SCOPE_OF, ApiKey, KeyRing, Scope
from modelserver.auth.authorized_planes import check_scope, keyed_planes
from modelserver.errors import ModelAsleepError, ServerError
from modelserver.frontends.http.clouds import CloudFrontend
from modelserver.frontends.http.router import Route, RouteCall
from modelserver.frontends.http.routes import HttpFrontend
from modelserver.protocol.exchange import Frontend, HttpExchange, HttpHead, HttpResponse
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import ErrorWriter
from modelserver.telemetry.audit import PEER

if TYPE_CHECKING:
    from modelserver.planes.control import AnyControlPlane
    from modelserver.planes.data import AnyDataPlane


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
            caller = None if self._is_open(head) else self._keys.caller(head.headers)
        except ServerError as error:
            exchange.respond(_refusal(error, self.errors(head.path)))
            return
        _as_caller(caller, super().handle, exchange)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """Refuses a request without a key for its route, or for the model that its path asks."""
        found = self._find(head)
        if found is not None and found[0].is_open:
            return WITHOUT_KEY
        try:
            caller = _caller_of(self._keys, None if found is None else SCOPE_OF[found[0].group], head, peer)
            if found is not None and found[0].group is ApiGroup.INFERENCE and "name" in found[1]:
                caller.check_model(found[1]["name"])
        except ServerError as error:
            return _refusal(error, self.errors(head.path))
        token = CALLER.set(caller)
        try:
            checked = super().check_head(head, peer)
        finally:
            CALLER.reset(token)
        return checked if isinstance(checked, HttpResponse) else Admitted(caller.name)

    def _is_open(self, head: HttpHead) -> bool:
        """Whether load balancers ask it, who have no key: whether the server lives and is ready; nothing of a model."""
        found = None if head.memo is not None else self._find(head)
        return found is not None and found[0].is_open

    def _guard(self, route: Route) -> Route:
        if route.is_open:
            return route
        return route.calling(self._answering(_scoped(route.call, SCOPE_OF[route.group])))

    def _answering(self, call: RouteCall) -> RouteCall:
        """Answers what the scope says in the words of the API that is asked."""

        def answer(exchange: HttpExchange, **named: str) -> None:
            try:
                call(exchange, **named)
            except ModelAsleepError:
                raise  # the exchange is handled again when the model is there
            except ServerError as error:
                exchange.respond(_refusal(error, self.errors(exchange.head.path)))

        return answer


class KeyedFrontend(Frontend):
    """Another frontend, such as that of the metrics, behind keys. `scope_of` says what a request needs.

    A request of no scope needs no key; what a rerouted request needs, its own frontend sees to.
    """

    def __init__(self, frontend: Frontend, keys: KeyRing, scope_of: Callable[[HttpHead], Scope | None]) -> None:
        self._frontend = frontend
        self._keys = keys
        self._scope_of = scope_of

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        caller = None
        try:
            scope = self._scope_of(head)
            if scope is not None:
                caller = self._keys.caller(head.headers)
                _check_scope(caller, scope, head)
        except ServerError as error:
            exchange.respond(_refusal(error, self.errors(head.path)))
            return
        _as_caller(caller, self._frontend.handle, exchange)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """Refuses a request without a key of the scope."""
        scope = self._scope_of(head)
        if scope is None:
            return WITHOUT_KEY
        try:
            return Admitted(_caller_of(self._keys, scope, head, peer).name)
        except ServerError as error:
            return _refusal(error, self.errors(head.path))

    def errors(self, path: str) -> ErrorWriter:
        return self._frontend.errors(path)


def keyed_metrics(frontend: Frontend, keys: KeyRing | None) -> Frontend:
    """The metrics, for keys of that scope."""
    return frontend if keys is None else KeyedFrontend(frontend, keys, lambda _: Scope.METRICS)


def keyed_cloud(frontend: CloudFrontend, keys: KeyRing | None) -> Frontend:
    """The endpoints of a cloud, by the groups of their routes. A path that is not there needs a key, too."""
    if keys is None:
        return frontend

    def scope_of(head: HttpHead) -> Scope | None:
        route = frontend.router.route(head.method, head.path)
        if route is None:
            return Scope.INFER
        return None if route.is_open else SCOPE_OF[route.group]

    return KeyedFrontend(frontend, keys, scope_of)


def _caller_of(keys: KeyRing, scope: Scope | None, head: HttpHead, peer: str) -> ApiKey:
    """The key that a head has, which must have that scope. Raises ServerError; refusals of control are recorded."""
    token = PEER.set(peer)
    try:
        caller = keys.caller(head.headers)
        if scope is not None:
            _check_scope(caller, scope, head)
    finally:
        PEER.reset(token)
    return caller


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


def _refusal(error: ServerError, errors: ErrorWriter) -> HttpResponse:
    response = errors.failed(error)
    if response.status == 401:
        response.headers = [*response.headers, ("WWW-Authenticate", "Bearer")]
    return response

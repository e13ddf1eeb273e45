"""The HTTP frontend of a port: APIs behind one router and one guard. Knows no path of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from modelserver.auth.access import EVERYBODY, Admitted
from modelserver.auth.api_keys import CALLER, ApiKey
from modelserver.auth.guard import Guard, Needs, RestrictedError
from modelserver.core.body_pipe import BodyPipe
from modelserver.errors import LoadOnDemandError, NotFoundError, ServerError, UnauthenticatedError
from modelserver.frontends.http.cors import PageGuard
from modelserver.frontends.http.router import Match, Router, allowed_methods, route_for
from modelserver.protocol.api import Api, Route
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.response import ErrorWriter, HttpResponse
from modelserver.telemetry.audit import PEER


class WaitingExchanges:
    """Keeps the Tasks of waiting exchanges. Event loop thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def retry(
        self,
        exchange: HttpExchange,
        unloaded: LoadOnDemandError,
        handle: Callable[[HttpExchange], None],
        errors: ErrorWriter,
    ) -> None:
        """Load the model, then call `handle` again; the wait ends if the client leaves."""
        task = asyncio.get_running_loop().create_task(
            _retry(exchange, unloaded, handle, errors), name="exchange for an unloaded model"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        exchange.on_disconnect = leave


async def _retry(
    exchange: HttpExchange, unloaded: LoadOnDemandError, handle: Callable[[HttpExchange], None], errors: ErrorWriter
) -> None:
    try:
        await unloaded.load()
    except Exception as error:
        exchange.on_disconnect = None
        exchange.respond(errors.failed(error))
    else:
        exchange.on_disconnect = None
        handle(exchange)


class HttpFrontend(HttpHandler):
    """Answers exchanges by the routes of its APIs. Called from the event loop thread.

    The guard admits a call by what its route needs, before the handler is called. Errors that a handler raises are
    answered in the form of the API. On a server with keys, unknown paths need a key, too, so that routes cannot be
    probed.
    """

    def __init__(self, apis: Sequence[Api], guard: Guard, pages: PageGuard | None = None) -> None:
        """Without `pages`, browsers may call for every page.

        Raises InvalidArgumentError when two of the APIs have the same route.
        """
        self._router = Router(apis)
        self._guard = guard
        self._pages = pages
        self._is_open = guard.is_idle
        self._waiting = WaitingExchanges()

    @property
    def routes(self) -> tuple[Route, ...]:
        """All routes that this frontend serves."""
        return self._router.routes

    @property
    def apis(self) -> tuple[Api, ...]:
        """The APIs, in the order in which they answer for paths that several have."""
        return self._router.apis

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        try:
            memo = head.memo
            if memo is not None:
                if self._is_open:
                    memo.recall(exchange, memo)
                else:
                    self._call(exchange, memo.needs, memo.recall, memo)
                return
            if self._pages is not None:  # heads with a memo have passed
                self._pages.check(head)
            found = self._router.find(head.path)
            route = None if found is None else route_for(found.routes, head.method)
            if found is None or route is None:
                response = self._nothing(head, found)
            elif self._is_open and not route.needs.is_control:
                route.call(exchange, **found.arguments)
                return
            else:
                self._call(exchange, route.needs, route.call, **found.arguments)
                return
        except LoadOnDemandError as unloaded:
            self._waiting.retry(exchange, unloaded, self.handle, self.errors(head.path))
            return
        except Exception as error:
            response = _failure(error, self.errors(head.path))
        exchange.respond(response)

    def api(self, path: str) -> Api:
        """The API that answers for the path, even if it has no such route."""
        return self._router.api(path)

    def errors(self, path: str) -> ErrorWriter:
        """The form of that API."""
        return self._router.api(path).errors

    def serves(self, head: HttpHead) -> bool:
        """Whether there is a route for a request with this head."""
        return self._router.route(head.method, head.path) is not None

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """Refuses a request that `handle` would refuse because of its head, or of the model that its path names."""
        found = self._router.route(head.method, head.path)
        if self._is_open:
            return EVERYBODY if found is None else _with_pipe(EVERYBODY, *found, None, peer)
        token = PEER.set(peer)
        try:
            if found is None:
                return self._guard.admission(self._guard.identify(head.headers))
            route, arguments = found
            caller = self._guard.admit(route.needs, head.headers, head.method, head.path)
            # The plane records refusals of control, with the operation.
            if caller is not None and route.model in arguments and not route.needs.is_control:
                caller.check_model(arguments[route.model])
        except ServerError as error:
            return _failure(error, self.errors(head.path))
        finally:
            PEER.reset(token)
        return _with_pipe(self._guard.admission(caller), route, arguments, caller, peer)

    def _call(
        self, exchange: HttpExchange, needs: Needs, call: Callable[..., None], *rest: object, **arguments: str
    ) -> None:
        """Call the handler of an admitted call. Its Tasks and callbacks know the caller, too."""
        head = exchange.head
        peer = PEER.set(exchange.peer) if needs.is_control else None
        try:
            caller = CALLER.set(self._guard.admit(needs, head.headers, head.method, head.path))
            try:
                call(exchange, *rest, **arguments)
            finally:
                CALLER.reset(caller)
        finally:
            if peer is not None:
                PEER.reset(peer)

    def _nothing(self, head: HttpHead, found: Match | None) -> HttpResponse:
        """The answer for a request without a route: 404 or 405. Raises as `Guard.identify`."""
        self._guard.identify(head.headers)
        if found is not None:
            return _not_allowed(head, found)
        nearest = self._router.nearest(head.path)
        starts = ", ".join(self._router.starts(head.path))
        hint = f"; did you mean {nearest}?" if nearest else f"; paths here begin with {starts}"
        error = NotFoundError(f"Not Found: there is no path '{head.path:.200}'{hint}")
        return _failure(error, self.errors(head.path))


def _with_pipe(
    admitted: Admitted, route: Route, arguments: Mapping[str, str], caller: ApiKey | None, peer: str
) -> Admitted:
    """The same; with a way to take the body piece by piece, if the route has one."""
    take_body = route.take_body
    if take_body is None:
        return admitted

    def open_body(num_bytes: int | None) -> BodyPipe:
        pipe = BodyPipe(num_bytes)
        tokens = CALLER.set(caller), PEER.set(peer)
        try:
            take_body(pipe, **arguments)
        except ServerError as error:
            pipe.fail(error)
        finally:
            CALLER.reset(tokens[0])
            PEER.reset(tokens[1])
        return pipe

    return replace(admitted, open_body=open_body)


def _not_allowed(head: HttpHead, found: Match) -> HttpResponse:
    allowed = ", ".join(allowed_methods(found.routes))
    message = f"Method Not Allowed: {head.method:.20} on {head.path:.200}, use {allowed}"
    response = found.api.errors.refused(405, message, "method_not_allowed")
    response.headers = [*response.headers, ("Allow", allowed)]
    return response


def _failure(error: Exception, errors: ErrorWriter) -> HttpResponse:
    if isinstance(error, RestrictedError):
        return errors.restricted(error.header)
    response = errors.failed(error)
    if isinstance(error, UnauthenticatedError):
        response.headers = [*response.headers, ("WWW-Authenticate", "Bearer")]
    return response

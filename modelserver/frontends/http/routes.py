"""The HTTP frontend: one table of routes, and the short handlers behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import EVERYBODY, Admitted, ApiGroup
from modelserver.config.message import config_to_json
from modelserver.errors import ModelAsleepError, NotFoundError
from modelserver.frontends.http import documents
from modelserver.frontends.http.control import Control
from modelserver.frontends.http.generate import Generate
from modelserver.frontends.http.inference import Inference, parse_version
from modelserver.frontends.http.log_settings import LogRoutes
from modelserver.frontends.http.overview import Overview
from modelserver.frontends.http.peers import with_peer
from modelserver.frontends.http.regions import Regions
from modelserver.frontends.http.restricted import restricted
from modelserver.frontends.http.router import Api, Match, Route, RouteCall, Router, allowed_methods, route_for
from modelserver.frontends.http.trace_settings import TraceRoutes
from modelserver.frontends.http.traffic import TrafficRoutes
from modelserver.frontends.http.waking import WakingExchanges
from modelserver.frontends.openai.routes import OpenAi
from modelserver.protocol.exchange import Frontend, HttpExchange, HttpHead, HttpResponse, ResponseWriter
from modelserver.protocol.http_status import bare_response, json_response
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import ErrorWriter

if TYPE_CHECKING:
    from modelserver.planes.control import AnyControlPlane
    from modelserver.planes.data import AnyDataPlane

# What this frontend can make true of the protocol's extensions; server metadata lists them in Triton's order.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)

_MODEL = "/v2/models/{name}"
_VERSION = "/v2/models/{name}/versions/{version}"


class HttpFrontend(Frontend):
    """Answers exchanges of KServe v2 with Triton's extensions and OpenAI's API. Called from the event loop thread."""

    def __init__(
        self,
        dataplane: AnyDataPlane,
        controlplane: AnyControlPlane,
        limits: HttpLimits | None = None,
        metrics: Frontend | None = None,
    ) -> None:
        """`metrics` answers /metrics on this port too, where they are served."""
        self._dataplane = dataplane
        self._view = Overview(dataplane, controlplane)
        self.limits = limits or HttpLimits()
        self._waking = WakingExchanges()
        inference = Inference(dataplane, self.limits)
        control = Control(controlplane, self.limits)
        generate = Generate(dataplane, self.limits)
        self._answer_infer: Callable[[HttpExchange, Any], None] = inference.answer
        routes = (
            *self._table(inference, control),
            *_generate_routes(generate),
            *Regions(dataplane, self.limits).routes(),
            *TrafficRoutes(controlplane, self.limits).routes(),
            *LogRoutes(controlplane, self.limits).routes(),
            *TraceRoutes(dataplane, self.limits).routes(),
            *(() if metrics is None else (Route("GET", "/metrics", metrics.handle, ApiGroup.STATISTICS),)),
        )
        apis = (Api("KServe", routes), OpenAi(dataplane, controlplane, self.limits).api())
        self._router = Router(tuple(self._with_guards(restricted(api, self.limits.access)) for api in apis))

    @property
    def routes(self) -> tuple[Route, ...]:
        """All that this frontend serves."""
        return self._router.routes

    def _with_guards(self, api: Api) -> Api:
        return replace(api, routes=tuple(with_peer(self._guard(route)) for route in api.routes))

    def _guard(self, route: Route) -> Route:
        """What stands before a route; here nothing."""
        return route

    def _table(self, inference: Inference, control: Control) -> tuple[Route, ...]:
        return (
            Route("POST", f"{_MODEL}/infer", inference.infer, ApiGroup.INFERENCE),
            Route("POST", f"{_VERSION}/infer", inference.infer, ApiGroup.INFERENCE),
            Route("GET", "/v2", self._server_metadata, ApiGroup.METADATA),
            Route("GET", "/v2/health/live", self._live, ApiGroup.HEALTH, is_open=True),
            Route("GET", "/v2/health/ready", self._ready, ApiGroup.HEALTH, is_open=True),
            Route("GET", "/v2/models", self._models, ApiGroup.METADATA),
            Route("GET", "/v2/models/stats", self._statistics, ApiGroup.STATISTICS),
            Route("GET", _MODEL, self._model_metadata, ApiGroup.METADATA),
            Route("GET", _VERSION, self._model_metadata, ApiGroup.METADATA),
            Route("GET", f"{_MODEL}/ready", self._model_ready, ApiGroup.HEALTH),
            Route("GET", f"{_VERSION}/ready", self._model_ready, ApiGroup.HEALTH),
            Route("GET", f"{_MODEL}/config", self._model_config, ApiGroup.MODEL_CONFIG),
            Route("GET", f"{_VERSION}/config", self._model_config, ApiGroup.MODEL_CONFIG),
            Route("GET", f"{_MODEL}/stats", self._statistics, ApiGroup.STATISTICS),
            Route("GET", f"{_VERSION}/stats", self._statistics, ApiGroup.STATISTICS),
            # Resetting changes what everybody sees: it is control.
            Route("POST", "/v2/models/stats/reset", self._reset_statistics, ApiGroup.MODEL_REPOSITORY),
            Route("POST", f"{_MODEL}/stats/reset", self._reset_statistics, ApiGroup.MODEL_REPOSITORY),
            Route("POST", f"{_VERSION}/stats/reset", self._reset_statistics, ApiGroup.MODEL_REPOSITORY),
            Route("GET", "/v2/overview", self._overview, ApiGroup.STATISTICS),
            Route("POST", "/v2/repository/index", control.index, ApiGroup.MODEL_REPOSITORY),
            Route("POST", "/v2/repository/{repository}/index", control.index, ApiGroup.MODEL_REPOSITORY),
            *_control_routes("load", control.load),
            *_control_routes("unload", control.unload),
        )

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        try:
            memo = head.memo
            if memo is not None:
                # Only infer calls leave one.
                self._answer_infer(exchange, memo)
                return
            found = self._router.find(head.path)
            if found is None:
                raise self._unknown(head.path)
            route = route_for(found.routes, head.method)
            if route is not None:
                route.call(exchange, **found.arguments)
                return
            response = _not_allowed(head, found)
        except ModelAsleepError as asleep:
            self._waking.retry(exchange, asleep, self.handle)
            return
        except Exception as error:
            response = self.errors(head.path).failed(error)
        exchange.respond(response)

    def errors(self, path: str) -> ErrorWriter:
        """The form of the API that the path belongs to."""
        return self._router.api(path).errors

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """Refuses a request for a restricted route that comes without its header."""
        access = self.limits.access
        found = self._find(head) if access.restrictions else None
        if found is None:
            return EVERYBODY
        route, arguments = found
        restriction = access.restriction(route.group)
        if restriction is None or restriction.allows(head.headers):
            return EVERYBODY
        refused = _HeadExchange(head, peer)
        route.call(refused, **arguments)
        assert refused.response is not None, "the guard of a restricted route answers at once"
        return refused.response

    def _find(self, head: HttpHead) -> tuple[Route, dict[str, str]] | None:
        """The route of a request, and the values in its path; None where an error answers it."""
        found = self._router.find(head.path)
        route = None if found is None else route_for(found.routes, head.method)
        return None if found is None or route is None else (route, found.arguments)

    def _unknown(self, path: str) -> NotFoundError:
        nearest = self._router.nearest(path)
        starts = ", ".join(self._router.starts(path))
        hint = f"; did you mean {nearest}?" if nearest else f"; paths here begin with {starts}"
        return NotFoundError(f"Not Found: there is no path '{path:.200}'{hint}")

    def _live(self, exchange: HttpExchange) -> None:
        is_live = self._dataplane.is_live
        exchange.respond(bare_response(_accepted(exchange), {"live": is_live}, 200 if is_live else 400))

    def _ready(self, exchange: HttpExchange) -> None:
        if self._dataplane.is_ready:
            exchange.respond(bare_response(_accepted(exchange), {"ready": True}))
            return
        status = 503 if self._dataplane.is_shutting_down else 400
        document = {"ready": False, "reasons": self._dataplane.unready_because()}
        exchange.respond(bare_response(_accepted(exchange), document, status))

    def _server_metadata(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response(documents.server_document(self._dataplane.server_metadata())))

    def _models(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response({"models": self._dataplane.model_names()}))

    def _model_metadata(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        metadata = self._dataplane.model_metadata(name, parse_version(name, version))
        exchange.respond(json_response(documents.model_document(metadata)))

    def _model_ready(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        is_ready = self._dataplane.model_is_ready(name, parse_version(name, version))
        document = {"name": name, "ready": is_ready} | ({} if is_ready else {"error": "Model version not ready"})
        if is_ready:
            exchange.respond(bare_response(_accepted(exchange), document))
        else:
            exchange.respond(json_response(document, 400))

    def _model_config(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        config = self._dataplane.model_config(name, parse_version(name, version))
        exchange.respond(json_response(config_to_json(config)))

    def _statistics(self, exchange: HttpExchange, name: str = "", version: str | None = None) -> None:
        entries = self._dataplane.statistics(name, parse_version(name, version))
        exchange.respond(json_response(documents.statistics_document(entries)))

    def _reset_statistics(self, exchange: HttpExchange, name: str = "", version: str | None = None) -> None:
        self._dataplane.reset_statistics(name, parse_version(name, version))
        exchange.respond(json_response({}))

    def _overview(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response(self._view.document()))


class _HeadExchange(HttpExchange):
    """A request that is refused by its head, and what is answered."""

    __slots__ = ("_peer", "response")

    def __init__(self, head: HttpHead, peer: str) -> None:
        self.head = head
        self.body = b""
        self.on_disconnect = None
        self.response: HttpResponse | None = None
        self._peer = peer

    @property
    def peer(self) -> str:
        return self._peer

    def respond(self, response: HttpResponse) -> None:
        self.response = response

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:  # noqa: ARG002  # never called
        raise AssertionError("a refusal is a whole answer")


def _not_allowed(head: HttpHead, found: Match) -> HttpResponse:
    allowed = ", ".join(allowed_methods(found.routes))
    message = f"Method Not Allowed: {head.method:.20} on {head.path:.200}, use {allowed}"
    response = found.api.errors.refused(405, message, "method_not_allowed")
    response.headers = [*response.headers, ("Allow", allowed)]
    return response


def _control_routes(verb: str, call: RouteCall) -> tuple[Route, ...]:
    """For a model or, which Triton does not know, one version of it; each with and without its repository's name."""
    return tuple(
        Route("POST", f"{repository}/models/{{name}}{version}/{verb}", call, ApiGroup.MODEL_REPOSITORY)
        for repository in ("/v2/repository", "/v2/repository/{repository}")
        for version in ("", "/versions/{version}")
    )


def _generate_routes(generate: Generate) -> tuple[Route, ...]:
    return tuple(
        Route("POST", f"{owner}/{verb}", call, ApiGroup.INFERENCE)
        for owner in (_MODEL, _VERSION)
        for verb, call in (("generate", generate.generate), ("generate_stream", generate.generate_stream))
    )


def _accepted(exchange: HttpExchange) -> str | None:
    return exchange.head.headers.get("accept")

"""KServe v2 with Triton's extensions over HTTP: one table of routes, and the short handlers behind it."""

from __future__ import annotations

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.config.message import config_to_json
from modelserver.frontends.http import documents
from modelserver.frontends.http.control import Control, LogRoutes, Regions, TraceRoutes, TrafficRoutes
from modelserver.frontends.http.documents import Overview
from modelserver.frontends.http.generate import Generate
from modelserver.frontends.http.inference import Inference, parse_version
from modelserver.frontends.http.schemas import SCHEMAS, TYPES
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.protocol.api import Api, Route, RouteCall
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, bare_response, json_response

# The protocol extensions that both frontends implement; server metadata lists them in Triton's order.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)

_RUNNING = b"modelserver is running: /docs shows what it serves\n"
_MODEL = "/v2/models/{name}"
_VERSION = "/v2/models/{name}/versions/{version}"


class KServe:
    """The handlers of the API. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._limits = limits
        self._view = Overview(dataplane, controlplane)

    def api(self) -> Api:
        """All of its routes."""
        dataplane, controlplane, limits = self._dataplane, self._controlplane, self._limits
        routes = (
            *Inference(dataplane, limits, dataplane).routes(),
            *self._table(),
            *_repository_routes(Control(controlplane, limits)),
            *_generate_routes(Generate(dataplane, limits)),
            *Regions(dataplane, limits).routes(),
            *TrafficRoutes(controlplane, limits).routes(),
            *LogRoutes(controlplane, limits).routes(),
            *TraceRoutes(dataplane, limits).routes(),
        )
        return Api("KServe", routes, beginnings=("/v2",)).described(SCHEMAS, TYPES)

    def _table(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/", _say_running, ApiGroup.HEALTH, key=KeyUse.UNUSED),
            Route("GET", "/v2", self._server_metadata, ApiGroup.METADATA),
            Route("GET", "/v2/health/live", self._live, ApiGroup.HEALTH, key=KeyUse.UNUSED),
            Route("GET", "/v2/health/ready", self._ready, ApiGroup.HEALTH, key=KeyUse.UNUSED),
            Route("GET", "/v2/models", self._models, ApiGroup.METADATA),
            Route("GET", "/v2/models/stats", self._statistics, ApiGroup.STATISTICS),
            Route("GET", _MODEL, self._model_metadata, ApiGroup.METADATA, model="name"),
            Route("GET", _VERSION, self._model_metadata, ApiGroup.METADATA, model="name"),
            Route("GET", f"{_MODEL}/ready", self._model_ready, ApiGroup.HEALTH, model="name"),
            Route("GET", f"{_VERSION}/ready", self._model_ready, ApiGroup.HEALTH, model="name"),
            Route("GET", f"{_MODEL}/config", self._model_config, ApiGroup.MODEL_CONFIG, model="name"),
            Route("GET", f"{_VERSION}/config", self._model_config, ApiGroup.MODEL_CONFIG, model="name"),
            Route("GET", f"{_MODEL}/stats", self._statistics, ApiGroup.STATISTICS, model="name"),
            Route("GET", f"{_VERSION}/stats", self._statistics, ApiGroup.STATISTICS, model="name"),
            # Resetting changes the statistics that everybody sees, so it is control.
            Route("POST", "/v2/models/stats/reset", self._reset_statistics, ApiGroup.MODEL_REPOSITORY),
            Route("POST", f"{_MODEL}/stats/reset", self._reset_statistics, ApiGroup.MODEL_REPOSITORY, model="name"),
            Route("POST", f"{_VERSION}/stats/reset", self._reset_statistics, ApiGroup.MODEL_REPOSITORY, model="name"),
            Route("GET", "/v2/overview", self._overview, ApiGroup.STATISTICS),
        )

    def _live(self, exchange: HttpExchange) -> None:
        is_live = self._dataplane.is_live
        exchange.respond(bare_response(_accepted(exchange), {"live": is_live}, 200 if is_live else 400))

    def _ready(self, exchange: HttpExchange) -> None:
        dataplane = self._dataplane
        # Routers read it, to know what others have sent.
        load = {"inflight_requests": dataplane.num_inflight()}
        if dataplane.is_ready:
            exchange.respond(bare_response(_accepted(exchange), {"ready": True} | load))
            return
        status = 503 if dataplane.is_shutting_down else 400
        document = {"ready": False, "state": dataplane.readiness_state(), "reasons": dataplane.unready_because()} | load
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


def _repository_routes(control: Control) -> tuple[Route, ...]:
    return (
        Route("POST", "/v2/repository/index", control.index, ApiGroup.MODEL_REPOSITORY),
        Route("POST", "/v2/repository/{repository}/index", control.index, ApiGroup.MODEL_REPOSITORY),
        *_control_routes("load", control.load),
        *_control_routes("unload", control.unload),
    )


def _control_routes(verb: str, call: RouteCall) -> tuple[Route, ...]:
    """For a model or, unlike Triton, one version of it; each with and without its repository's name."""
    return tuple(
        Route("POST", f"{repository}/models/{{name}}{version}/{verb}", call, ApiGroup.MODEL_REPOSITORY, model="name")
        for repository in ("/v2/repository", "/v2/repository/{repository}")
        for version in ("", "/versions/{version}")
    )


def _generate_routes(generate: Generate) -> tuple[Route, ...]:
    return tuple(
        Route("POST", f"{owner}/{verb}", call, ApiGroup.INFERENCE, model="name")
        for owner in (_MODEL, _VERSION)
        for verb, call in (("generate", generate.generate), ("generate_stream", generate.generate_stream))
    )


def _say_running(exchange: HttpExchange) -> None:
    """Clients ask for this before they call anything."""
    exchange.respond(HttpResponse(200, (("Content-Type", "text/plain; charset=utf-8"),), (_RUNNING,)))


def _accepted(exchange: HttpExchange) -> str | None:
    return exchange.head.headers.get("accept")

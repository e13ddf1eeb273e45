"""Ollama's API beside the others: its routes, and who may call them."""

from __future__ import annotations

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.frontends.http.framing import NDJSON
from modelserver.frontends.llm.edge import CallEdge, LaterAnswers
from modelserver.frontends.ollama.errors import OllamaErrors
from modelserver.frontends.ollama.generation import Embedding, Generation
from modelserver.frontends.ollama.models import OllamaModels
from modelserver.frontends.ollama.schemas import SCHEMAS, TYPES
from modelserver.frontends.ollama.store import StoreRoutes
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.exchange import HttpExchange, HttpResponse
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import json_response

# The version of Ollama whose documents these are: clients ask for it before they use what is new.
_VERSION = "0.13.5"
_TEXT_HEADERS = (("Content-Type", "text/plain; charset=utf-8"),)


class Ollama:
    """The handlers of the API. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._limits = limits
        self._errors = OllamaErrors()
        self._models = OllamaModels(dataplane, controlplane)
        self._edge = CallEdge(dataplane, limits, errors=self._errors, framing=NDJSON, takes_any_type=True)
        self._later = LaterAnswers(self._errors)

    def api(self) -> Api:
        """The routes that ask models and describe them. On a port of its own, `/` says that the server runs."""
        generation = Generation(self._dataplane, self._models)
        embedding = Embedding(self._dataplane, self._models)
        handler = self._edge.handler
        calls = {
            "/api/chat": generation.chat,
            "/api/generate": generation.generate,
            "/api/embed": embedding.embed,
            "/api/embeddings": embedding.embed_one,
        }
        store = StoreRoutes(self._dataplane, self._controlplane, self._limits, self._later)
        changes = {"pull": store.pull, "push": store.push, "create": store.create, "copy": store.copy}
        changing = ApiGroup.MODEL_REPOSITORY
        return Api(
            "Ollama",
            (
                *(Route("POST", f"/api/{name}", handler(serve), changing) for name, serve in changes.items()),
                Route("DELETE", "/api/delete", handler(store.delete), changing),
                Route("HEAD", "/api/blobs/{digest}", store.has_blob, changing),
                Route("POST", "/api/blobs/{digest}", store.add_blob, changing, take_body=store.take_blob),
                *(Route("POST", path, handler(serve), ApiGroup.INFERENCE) for path, serve in calls.items()),
                Route("POST", "/api/show", handler(self._models.show), ApiGroup.METADATA),
                Route("GET", "/api/tags", self._tags, ApiGroup.METADATA),
                Route("GET", "/api/ps", self._running, ApiGroup.METADATA),
                Route("GET", "/api/version", self._version, ApiGroup.METADATA),
            ),
            self._errors,
            beginnings=("/api",),
            own_routes=(Route("GET", "/", _say_running, ApiGroup.HEALTH, key=KeyUse.UNUSED),),
        ).described(SCHEMAS, TYPES)

    def _version(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response({"version": _VERSION}))

    def _tags(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._models.tags())

    def _running(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._models.running())


def _say_running(exchange: HttpExchange) -> None:
    """Scripts and clients look for this sentence."""
    exchange.respond(HttpResponse(200, _TEXT_HEADERS, (b"Ollama is running",)))

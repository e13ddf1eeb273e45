"""OpenAI's API beside KServe's: its routes, and who may call them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.errors import LoadOnDemandError, ServerError
from modelserver.frontends.http.body import parse_object
from modelserver.frontends.http.framing import SSE_DONE
from modelserver.frontends.llm.edge import Call, CallEdge, LaterAnswers, Serve
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.models import (
    LanguageModel,
    adapters_of,
    find_model,
    known_models,
    load_on_demand,
    unloaded_models,
)
from modelserver.frontends.llm.requests import only_responses
from modelserver.frontends.openai.audio import Audio, FormEdge
from modelserver.frontends.openai.batches.routes import BatchRoutes
from modelserver.frontends.openai.batches.service import BatchService
from modelserver.frontends.openai.chat import Chat
from modelserver.frontends.openai.classifying import Classifying
from modelserver.frontends.openai.completions import Completions
from modelserver.frontends.openai.embeddings import Embeddings
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.openai.images import Images
from modelserver.frontends.openai.ranking import Ranking
from modelserver.frontends.openai.responses.routes import Responses
from modelserver.frontends.openai.schemas import SCHEMAS, TYPES
from modelserver.frontends.openai.speech import Speech
from modelserver.frontends.openai.tokens import Tokens
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, json_response

_OWNER = "modelserver"


class OpenAi:
    """The handlers of the API. Called from the event loop thread."""

    def __init__(
        self,
        dataplane: AnyDataPlane,
        controlplane: AnyControlPlane,
        limits: HttpLimits,
        batches: BatchService | None = None,
    ) -> None:
        """Without `batches` files and batches are refused."""
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._http_limits = limits
        self._batches = batches
        self._edge = CallEdge(dataplane, limits, errors=OpenAiErrors(), framing=SSE_DONE)
        self._created_s = int(time.time())
        self._later = LaterAnswers(OpenAiErrors())

    def api(self) -> Api:
        """OpenAI's routes, and those of vLLM and TEI beside them."""
        tokens = Tokens(self._dataplane)
        ranking = Ranking(self._dataplane)
        classifying = Classifying(self._dataplane)
        audio = Audio(self._dataplane)
        adapters = AdapterRoutes(self._dataplane, self._controlplane)
        handler = self._edge.handler
        forms = FormEdge(self._dataplane, self._http_limits, errors=OpenAiErrors(), framing=SSE_DONE)
        calls: dict[str, Serve] = {
            "/v1/completions": Completions(self._dataplane).serve,
            "/v1/chat/completions": Chat(self._dataplane).serve,
            "/v1/embeddings": Embeddings(self._dataplane).serve,
            "/v1/moderations": classifying.moderate,
            "/rerank": ranking.rerank,
            "/v1/rerank": ranking.rerank,
            # Cohere cuts documents that are too long.
            "/v2/rerank": partial(ranking.rerank, cuts=True),
            "/score": ranking.score,
            "/v1/score": ranking.score,
            "/similarity": ranking.similarity,
            "/classify": classifying.classify,
            "/pooling": classifying.pool,
            "/predict": classifying.predict,
            "/tokenize": tokens.tokenize,
            "/detokenize": tokens.detokenize,
        }
        routes = (
            Route("GET", "/v1/models", self._models, ApiGroup.METADATA),
            Route("GET", "/v1/models/{id}", self._model, ApiGroup.METADATA, model="id"),
            Route("POST", "/v1/models/{id}/load", self._load, ApiGroup.MODEL_REPOSITORY, model="id"),
            Route("POST", "/v1/models/{id}/unload", self._unload, ApiGroup.MODEL_REPOSITORY, model="id"),
            *(Route("POST", path, handler(serve), ApiGroup.INFERENCE) for path, serve in calls.items()),
            Route("POST", "/v1/audio/speech", handler(Speech(self._dataplane).speak), ApiGroup.INFERENCE),
            Route("POST", "/v1/images/generations", handler(Images(self._dataplane).draw), ApiGroup.INFERENCE),
            Route("POST", "/v1/audio/transcriptions", forms.handler(audio.transcribe), ApiGroup.INFERENCE),
            Route("POST", "/v1/audio/translations", forms.handler(audio.translate), ApiGroup.INFERENCE),
            *Responses(self._dataplane, self._http_limits).routes(),
            *BatchRoutes(self._batches, self._dataplane, self._http_limits).routes(),
            Route("POST", "/v1/load_lora_adapter", handler(adapters.load), ApiGroup.MODEL_REPOSITORY),
            Route("POST", "/v1/unload_lora_adapter", handler(adapters.unload), ApiGroup.MODEL_REPOSITORY),
            Route("GET", "/health", self._health, ApiGroup.HEALTH, key=KeyUse.UNUSED),
            Route("GET", "/ping", self._health, ApiGroup.HEALTH, key=KeyUse.UNUSED),
            Route("POST", "/ping", self._health, ApiGroup.HEALTH, key=KeyUse.UNUSED),
            Route("GET", "/version", self._version, ApiGroup.METADATA),
        )
        return Api(
            "OpenAI",
            routes,
            OpenAiErrors(),
            beginnings=(
                "/v1",
                "/v2/rerank",
                *(path for path in calls if not path.startswith("/v")),
                "/health",
                "/ping",
                "/version",
            ),
        ).described(SCHEMAS, TYPES)

    def _models(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._all())

    async def _all(self) -> dict[str, Any]:
        """With the models that a request would load, as far as they are known before: clients ask for what they see."""
        data = []
        for model in await known_models(self._dataplane):
            described = self._describe(model)
            data += [described, *describe_adapters(self._dataplane, model, described)]
        return {"object": "list", "data": data}

    def _model(self, exchange: HttpExchange, id: str) -> None:  # noqa: A002  # the segment's name in OpenAI's API
        self._later.begin(exchange, self._one(id))

    async def _one(self, name: str) -> dict[str, Any]:
        """A model that is not in memory is loaded only if it cannot be told otherwise what it is."""
        if (other := self._other(name)) is not None:
            return other
        try:
            model = await find_model(self._dataplane, name, "is_served")
            described = self._describe(model)
            adapters = describe_adapters(self._dataplane, model, described)
            return next((each for each in adapters if each["id"] == model.adapter), described)
        except LoadOnDemandError as unloaded:
            for model in await unloaded_models(self._dataplane):
                if name in (model.name, model.shown_name):
                    return self._describe(model)
            await load_on_demand(self._dataplane, name, unloaded)
        return self._describe(await find_model(self._dataplane, name, "is_served"))

    def _other(self, name: str) -> dict[str, Any] | None:
        """What KServe's protocol of version 1 says of a model of another kind, which has the same route; None for
        language models."""
        try:
            if LanguageModel(self._dataplane.model_config(name)).is_served:
                return None
            return {"name": name, "ready": self._dataplane.model_is_ready(name)}
        except ServerError:
            return None

    def _load(self, exchange: HttpExchange, id: str) -> None:  # noqa: A002  # as in `_model`
        """Load or reload a model, in explicit mode; answers when it is ready."""
        self._need_no_body(exchange, "load", id)
        self._later.begin(exchange, self._loaded(id), outlives_client=True)

    async def _loaded(self, name: str) -> dict[str, Any]:
        await self._controlplane.load(name, {})
        return self._describe(LanguageModel(self._dataplane.model_config(name)))

    def _unload(self, exchange: HttpExchange, id: str) -> None:  # noqa: A002  # as in `_model`
        """Unload a model, in explicit mode."""
        self._need_no_body(exchange, "unload", id)
        self._later.begin(exchange, self._unloaded(id), outlives_client=True)

    async def _unloaded(self, name: str) -> dict[str, Any]:
        await self._controlplane.unload(name, {})
        return {"status": "success", "model": name}

    def _need_no_body(self, exchange: HttpExchange, verb: str, name: str) -> None:
        """Raise ParameterError for members of a body, which would be ignored."""
        for member in parse_object(exchange.body, self._http_limits):
            advice = f"POST /v2/repository/models/{name}/{verb} takes parameters"
            raise ParameterError(f"'{member:.100}' is not known here: this call takes no body, {advice}", member)

    def _describe(self, model: LanguageModel) -> dict[str, Any]:
        return {
            "id": model.shown_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": _OWNER,
            "root": model.shown_name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    def _health(self, exchange: HttpExchange) -> None:
        """200 without a body, or 503 while models load or the server stops."""
        exchange.respond(HttpResponse(200 if self._dataplane.is_ready else 503))

    def _version(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response({"version": self._dataplane.server_metadata().version}))


class AdapterRoutes:
    """Serves the calls of the routes. `model`, or vLLM's `base_model_name`, says which model where several take
    adapters."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane

    async def load(self, call: Call) -> None:
        """Answer when the adapter has been read and fits the model. Raises ServerError."""
        fields = call.fields
        name, place = fields.text("lora_name"), fields.text("lora_path")
        if not name or not place:
            raise ParameterError("Both 'lora_name' and 'lora_path' must be provided.", "lora_name", Fault.MISSING)
        model = await self._model(call)
        loads = self._controlplane.adapters_for("load", model.name)
        replaces = fields.flag("load_inplace")
        if name in model.listed_adapters or any(name == each.name for each in await known_models(self._dataplane)):
            raise ParameterError(f"'{name:.200}' is a model, or an adapter of a model's files", "lora_name")
        adapter = loads.make(model.name, name, place, replaces=replaces)
        request = model.request({"operation": "load_adapter"}, {})
        request.parameters = {"lora_name": name}
        request.adapters = (adapter,)
        await only_responses(self._dataplane, [call.adopt(request)])
        loads.add(model.name, adapter)
        call.answer_plain(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, call: Call) -> None:
        """Requests that run end with the adapter. Raises ServerError."""
        name = call.fields.text("lora_name")
        if not name:
            raise ParameterError(
                "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name", Fault.MISSING
            )
        model = await self._model(call)
        loads = self._controlplane.adapters_for("unload", model.name)
        if name in model.listed_adapters:
            raise ParameterError(
                f"the adapter '{name:.200}' is one of the files of the model '{model.name}': remove it there",
                "lora_name",
            )
        loads.remove(model.name, name)
        call.answer_plain(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _model(self, call: Call) -> LanguageModel:
        name = call.fields.text("model") or call.fields.text("base_model_name")
        return await find_model(self._dataplane, name, "adapts")


def describe_adapters(dataplane: AnyDataPlane, model: LanguageModel, described: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of /v1/models for a model's adapters, beside its own."""
    return [
        {**described, "id": name, "root": place, "parent": described["id"]}
        for name, place in adapters_of(dataplane, model).items()
    ]

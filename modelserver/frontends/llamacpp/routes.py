"""The API of llama.cpp's server beside the others.

That server has one model, so its clients name none, or any. Here a request is for the only language model, unless its
body names one (`model`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llamacpp.answers import CompletionWriter
from modelserver.frontends.llamacpp.errors import LlamaCppErrors, NotSupportedError
from modelserver.frontends.llamacpp.request import (
    MixedPrompt,
    SeenPrompt,
    read_bias,
    read_prompts,
    read_request,
    read_scales,
)
from modelserver.frontends.llamacpp.schemas import SCHEMAS, TYPES
from modelserver.frontends.llamacpp.slots import idle_slot, metrics_page, slots_of
from modelserver.frontends.llamacpp.tokens import Tokens
from modelserver.frontends.llm.answering import answer, prepare, prompt_input
from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.edge import Call, CallEdge, LaterAnswers, Serve, query_value
from modelserver.frontends.llm.embedding import embed
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.models import LanguageModel, adapters_of, find_model
from modelserver.frontends.llm.pictures import IMAGE
from modelserver.frontends.llm.prompts import template_of
from modelserver.frontends.openai.ranking import Ranking
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, json_response
from modelserver.telemetry.exposition import TEXT_CONTENT_TYPE

# Routes of llama.cpp's server that have no meaning here -> why.
NOT_SERVED: dict[tuple[str, str], str] = {
    ("POST", "/slots/{id_slot}"): "prefixes of prompts are cached for all slots together, and no slot has files",
}


class LlamaCpp:
    """The handlers of the API. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._errors = LlamaCppErrors()
        self._edge = CallEdge(dataplane, limits, errors=self._errors, framing=SSE, takes_any_type=True)
        self._later = LaterAnswers(self._errors)
        self._tokens = Tokens(dataplane)
        self._ranking = Ranking(dataplane)
        # By model and adapter: how much requests of this API get of it that do not say `lora`.
        self._scales: dict[str, dict[str, float]] = {}

    def api(self) -> Api:
        """The routes. Paths that other APIs have on the HTTP port need a port of llama.cpp's own."""
        refused = [Route(method, path, _refuser(why), ApiGroup.INFERENCE) for (method, path), why in NOT_SERVED.items()]
        return Api(
            "llamacpp",
            (
                self._post("/completion", self.complete),
                self._post("/completions", self.complete),
                self._post("/infill", self.infill),
                self._post("/apply-template", self._tokens.apply_template),
                self._post("/embedding", self.embed),
                self._post("/embeddings", self.embed),
                self._post("/reranking", self.rerank),
                Route("GET", "/props", self._props, ApiGroup.METADATA),
                Route("GET", "/lora-adapters", self._adapters, ApiGroup.METADATA),
                Route("POST", "/lora-adapters", self._scale_adapters, ApiGroup.MODEL_REPOSITORY),
                Route("POST", "/props", self._edge.handler(self._change_props), ApiGroup.MODEL_REPOSITORY),
                Route("GET", "/slots", self._slots, ApiGroup.STATISTICS),
                *refused,
            ),
            self._errors,
            beginnings=(
                "/completion",
                "/completions",
                "/infill",
                "/apply-template",
                "/embedding",
                "/embeddings",
                "/props",
                "/slots",
                "/lora-adapters",
                "/reranking",
            ),
            own_routes=(
                self._post("/rerank", self.rerank),
                self._post("/tokenize", self._tokens.tokenize),
                self._post("/detokenize", self._tokens.detokenize),
                Route("GET", "/health", self._health, ApiGroup.HEALTH, key=KeyUse.UNUSED),
                Route("GET", "/metrics", self._metrics, ApiGroup.STATISTICS),
            ),
        ).described(SCHEMAS, TYPES)

    async def complete(self, call: Call) -> None:
        """Continue prompts. Raises ServerError for what goes wrong before the answer begins."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        prompts, is_array = read_prompts(call.fields, "prompt")
        await self._answer(call, model, prompts, is_array=is_array)

    async def infill(self, call: Call) -> None:
        """Fill in what is between two texts. Raises ServerError."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        call.fields.need("input_suffix", "a string")
        prompt, ends = await self._tokens.filled(model, call.fields)
        await self._answer(call, model, [[*prompt]], is_array=False, ends=ends)

    async def embed(self, call: Call) -> None:
        """Answer with a vector for each text. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "embeds")
        if fields.document.get("embd_normalize") not in (None, 2):
            raise ParameterError(
                "'embd_normalize' is not supported: vectors are normalized as the model's config says",
                "embd_normalize",
                Fault.UNSUPPORTED_PARAMETER,
            )
        prompts, _ = read_prompts(fields, "input" if fields.has("input") else "content")
        if seen := next((each for each in prompts if isinstance(each, SeenPrompt)), None):
            param = seen.pictures[0].param
            raise ParameterError(f"'{param}': no vectors are made of pictures", param, Fault.UNSUPPORTED_CONTENT)
        inputs = [prompt_input(await self._tokens.plain(model, prompt)) for prompt in prompts]
        made = await embed(self._dataplane, model, call, inputs)
        call.answer([{"index": index, "embedding": [vector.tolist()]} for index, vector in enumerate(made.vectors)])

    async def rerank(self, call: Call) -> None:
        """Answer with documents in the order in which they fit a query, by the network's own numbers.

        Raises ServerError.
        """
        await self._ranking.rerank(call, is_raw=True)

    async def _answer(
        self,
        call: Call,
        model: LanguageModel,
        mixed: list[MixedPrompt],
        *,
        is_array: bool,
        ends: tuple[int, ...] = (),
    ) -> None:
        """`ends` are further tokens that end the text."""
        asked = read_request(call.fields, mixed, is_array=is_array)
        biases = await self._tokens.biases(model, read_bias(call.fields))
        sampling = asked.sampling | ({"logit_bias": biases} if biases else {})
        if ends:
            sampling["stop_token_ids"] = [*ends]
        if (scales := self._scales_for(call, model)) and model.adapter is None:
            sampling["lora"] = [{"name": name, "scale": scale} for name, scale in scales.items()]
        prompts = [await self._tokens.plain(model, prompt) for prompt in mixed]
        generate = GenerateCall(
            prompts=tuple(prompts),
            pictures=tuple(each.pictures if isinstance(each, SeenPrompt) else () for each in mixed),
            sampling=sampling,
            num_choices=asked.num_choices,
            is_streamed=True,
            has_token_ids=asked.has_tokens or (asked.is_streamed and "return_token_ids" in model.inputs),
        )
        prepared = await prepare(self._dataplane, model, generate, call)
        # The model streams in any case, which tells when its first token came; the answer may be whole.
        prepared = replace(prepared, call=replace(generate, is_streamed=asked.is_streamed))
        writer = CompletionWriter(asked, prepared, call, await self._tokens.texts(model, prompts))
        await answer(self._dataplane, prepared, call, writer)

    def _post(self, path: str, serve: Serve) -> Route:
        return Route("POST", path, self._edge.handler(serve), ApiGroup.INFERENCE)

    def _props(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._describe(exchange.head.query))

    async def _describe(self, query: str) -> dict[str, Any]:
        """What clients ask for before they begin: the context's length, above all."""
        model = await find_model(self._dataplane, query_value(query, "model"))
        slots = await slots_of(self._dataplane, model)
        return {
            "default_generation_settings": {**idle_slot(0, model.max_model_len or 0), "prompt": ""},
            "total_slots": len(slots),
            "model_alias": model.name,
            "model_path": model.name,
            "modalities": {"vision": IMAGE in model.inputs, "audio": False},
            "chat_template": await template_of(self._dataplane, model),
            "build_info": f"modelserver-{self._dataplane.server_metadata().version}",
        }

    async def _change_props(self, call: Call) -> None:
        """As llama.cpp's server, which knows no property that can be changed. Raises ParameterError for one."""
        for name in call.fields.document:
            raise ParameterError(f"'{name:.100}' cannot be changed: properties are those of the model's config", name)
        call.answer({"success": True})

    def _slots(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._described_slots(exchange.head.query))

    async def _described_slots(self, query: str) -> HttpResponse:
        model = await find_model(self._dataplane, query_value(query, "model"))
        slots = await slots_of(self._dataplane, model)
        if query_value(query, "fail_on_no_slot") and all(slot["is_processing"] for slot in slots):
            return self._errors.refused(503, "no slot available")
        return json_response(slots)

    def _metrics(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._page(exchange.head.query))

    async def _page(self, query: str) -> HttpResponse:
        model = await find_model(self._dataplane, query_value(query, "model"))
        page = metrics_page(self._dataplane, model)
        return HttpResponse(200, [("Content-Type", TEXT_CONTENT_TYPE)], (page.encode(),))

    def _scales_for(self, call: Call, model: LanguageModel) -> dict[str, float]:
        names = list(adapters_of(self._dataplane, model))
        given = read_scales(call.fields.document.get("lora"), names)
        if given is not None:
            return given
        return {name: scale for name, scale in self._scales.get(model.name, {}).items() if name in names}

    def _adapters(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._described_adapters(exchange))

    async def _described_adapters(self, exchange: HttpExchange) -> HttpResponse:
        model = await find_model(self._dataplane, query_value(exchange.head.query, "model"))
        scales = self._scales.get(model.name, {})
        adapters = adapters_of(self._dataplane, model)
        return json_response(
            [
                {"id": number, "path": path, "scale": scales.get(name, 0.0), "name": name}
                for number, (name, path) in enumerate(adapters.items())
            ]
        )

    def _scale_adapters(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._scaled_adapters(exchange))

    async def _scaled_adapters(self, exchange: HttpExchange) -> HttpResponse:
        """As llama.cpp's server: those that the body does not name get scale 0."""
        model = await find_model(self._dataplane, query_value(exchange.head.query, "model"))
        try:
            value = orjson.loads(exchange.body)
        except ValueError as error:
            raise ParameterError(f"the body must be an array of objects with id and scale: {error}", None) from None
        self._scales[model.name] = read_scales(value, list(adapters_of(self._dataplane, model))) or {}
        return json_response({"success": True})

    def _health(self, exchange: HttpExchange) -> None:
        if self._dataplane.is_ready:
            exchange.respond(json_response({"status": "ok"}))
        else:
            exchange.respond(self._errors.refused(503, "Loading model"))


def _refuser(why: str) -> Any:
    def refuse(_exchange: HttpExchange, **_names: str) -> None:
        raise NotSupportedError(f"This server does not support this call: {why}")

    return refuse

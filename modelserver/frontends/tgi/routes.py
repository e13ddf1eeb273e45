"""The API of text-generation-inference (TGI) beside the others.

TGI serves one model, so its clients name none. Here a request is for the only language model, unless its body or its
query names one (`model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llm.answering import answer, prepare
from modelserver.frontends.llm.call import GenerateCall, Prompt
from modelserver.frontends.llm.edge import Call, CallEdge, LaterAnswers, Serve, query_value
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.prompts import conversation_input, token_pieces_of
from modelserver.frontends.openai.chat_request import read_conversation
from modelserver.frontends.tgi.answers import Document, TgiDurations, TgiWriter, prefill_documents
from modelserver.frontends.tgi.errors import TgiErrors
from modelserver.frontends.tgi.request import MAX_BEST_OF, MAX_STOPS, TgiRequest, read_request
from modelserver.frontends.tgi.schemas import SCHEMAS, TYPES
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.exchange import HttpExchange, HttpResponse
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import json_response

# The version of TGI whose documents these are.
_VERSION = "3.3.6"


class Tgi:
    """The handlers of the API. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._errors = TgiErrors()
        self._edge = CallEdge(dataplane, limits, errors=self._errors, framing=SSE)
        self._later = LaterAnswers(self._errors)

    def api(self) -> Api:
        """The routes. Paths that OpenAI's API has on the HTTP port, and SageMaker on its own, need a port of TGI's."""
        return Api(
            "TGI",
            (
                self._post("/generate", partial(self.generate, is_streamed=False)),
                self._post("/generate_stream", partial(self.generate, is_streamed=True)),
                self._post("/chat_tokenize", self.chat_tokenize),
                Route("GET", "/info", self._info, ApiGroup.METADATA),
            ),
            self._errors,
            beginnings=("/generate", "/generate_stream", "/chat_tokenize", "/info"),
            own_routes=(
                self._post("/", self.generate_as_asked),
                self._post("/tokenize", self.tokenize),
                self._post("/invocations", self.generate_as_asked),
                *(
                    Route("GET", path, self._health, ApiGroup.HEALTH, key=KeyUse.UNUSED)
                    for path in ("/", "/health", "/ping")
                ),
            ),
        ).described(SCHEMAS, TYPES)

    async def generate(self, call: Call, *, is_streamed: bool) -> None:
        """Continue `inputs`. Raises ServerError for what goes wrong before the answer begins."""
        await self._answer(call, is_streamed=is_streamed)

    async def generate_as_asked(self, call: Call) -> None:
        """The same in the older form: the body says whether to stream, a whole answer is an array of one text, and the
        prompt precedes the text unless the request says otherwise."""
        await self._answer(call, is_streamed=call.fields.flag("stream"), is_older=True)

    async def tokenize(self, call: Call) -> None:
        """Answer with the tokens of a text. Raises ServerError."""
        await tokenize(self._dataplane, call, _model_name(call))

    async def chat_tokenize(self, call: Call) -> None:
        """Answer with the tokens of a conversation. Raises ServerError."""
        await chat_tokenize(self._dataplane, call, _model_name(call))

    async def _answer(self, call: Call, *, is_streamed: bool, is_older: bool = False) -> None:
        durations = TgiDurations()
        model = await find_model(self._dataplane, _model_name(call))
        asked = read_request(call.fields, model, is_streamed=is_streamed, has_full_text=is_older)
        prompt, prefill = await self._prompt(model, asked)
        generate = _generate_call(asked, model, prompt, is_streamed=is_streamed)
        prepared = await prepare(self._dataplane, model, generate, call)
        durations.note_sent()
        writer = TgiWriter(asked, prepared, call, durations, prefill=prefill, is_in_array=is_older)
        await answer(self._dataplane, prepared, call, writer)

    async def _prompt(self, model: LanguageModel, asked: TgiRequest) -> tuple[Prompt, list[Document] | None]:
        """The prompt as the model gets it, and its tokens if they are told."""
        if asked.truncate is None and not asked.has_prefill:
            return asked.prompt, None
        inputs = {"text_input": asked.inputs}
        ids, pieces = await token_pieces_of(
            self._dataplane, model, inputs, adds_special_tokens=asked.adds_special_tokens
        )
        if asked.truncate is not None:
            # The end of a prompt matters most.
            ids, pieces = ids[-asked.truncate :], pieces[-asked.truncate :]
        return ids, prefill_documents(ids, pieces) if asked.has_prefill else None

    def _post(self, path: str, serve: Serve) -> Route:
        return Route("POST", path, self._edge.handler(serve), ApiGroup.INFERENCE)

    def _info(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._describe(exchange.head.query))

    async def _describe(self, query: str) -> dict[str, Any]:
        model = await find_model(self._dataplane, query_value(query, "model"))
        longest = model.max_model_len
        return {
            "model_id": model.name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": None,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": None if longest is None else longest - 1,
            "max_total_tokens": longest,
            "validation_workers": None,
            "max_client_batch_size": 1,
            "router": "text-generation-router",
            "version": _VERSION,
            "sha": None,
            "docker_label": None,
        }

    def _health(self, exchange: HttpExchange) -> None:
        """200 without a body, or 503 while models load or the server stops."""
        if self._dataplane.is_ready:
            exchange.respond(HttpResponse(200))
        else:
            exchange.respond(json_response({"error": "unhealthy", "error_type": "healthcheck"}, 503))


def _generate_call(asked: TgiRequest, model: LanguageModel, prompt: Prompt, *, is_streamed: bool) -> GenerateCall:
    sampling = dict(asked.sampling)
    # A stream tells every token, of a model that can; what the model thinks of it, where details are asked for.
    tells_ids = is_streamed and "return_token_ids" in model.inputs
    tells = not model.inputs.keys().isdisjoint(("return_token_logprobs", "return_logprobs"))
    if asked.has_details or (is_streamed and (asked.num_top or (tells and not tells_ids))):
        sampling["logprobs"] = asked.num_top
        tells_ids = False
    if asked.has_prefill:
        sampling["prompt_logprobs"] = 0
    if asked.best_of > 1:
        sampling["n"] = asked.best_of
    return GenerateCall(
        prompts=(prompt,),
        pictures=(asked.pictures,),
        sampling=sampling,
        num_choices=asked.best_of,
        is_streamed=is_streamed,
        has_token_ids=tells_ids,
        ranks_choices=asked.best_of > 1,
        adds_special_tokens=None if asked.adds_special_tokens or not isinstance(prompt, str) else False,
    )


def _model_name(call: Call) -> str:
    return call.fields.text("model") or call.query("model")


async def tokenize(dataplane: AnyDataPlane, call: Call, name: str) -> None:
    """Answer with the tokens of `inputs`. Raises ServerError."""
    fields = call.fields
    model = await find_model(dataplane, name, "tokenizes" if name else "generates")
    fields.need("inputs", "a string")
    text = fields.text("inputs") or ""
    adds = fields.flag("add_special_tokens", True)
    call.answer(await _tokens(dataplane, model, text, adds_special_tokens=adds))


async def chat_tokenize(dataplane: AnyDataPlane, call: Call, name: str) -> None:
    """Answer with the text that the model's template makes of a conversation, and its tokens. Raises ServerError."""
    model = await find_model(dataplane, name, "tokenizes" if name else "generates")
    prompt = await conversation_input(dataplane, model, read_conversation(call.fields), call.picture_urls)
    # A template has written the special tokens.
    adds = False if "text_input" in prompt else None
    ids, pieces = await token_pieces_of(dataplane, model, prompt, adds_special_tokens=adds)
    text = b"".join(pieces).decode(errors="replace") if ids else ""
    text = prompt.get("text_input", text)
    call.answer({"tokenize_response": _placed(text, ids, pieces), "templated_text": text})


async def _tokens(
    dataplane: AnyDataPlane, model: LanguageModel, text: str, *, adds_special_tokens: bool
) -> list[Document]:
    prompt = {"text_input": text}
    ids, pieces = await token_pieces_of(dataplane, model, prompt, adds_special_tokens=adds_special_tokens)
    return _placed(text, ids, pieces)


def _placed(text: str, ids: Sequence[int], pieces: Sequence[bytes]) -> list[Document]:
    """The tokens with their places, in characters.

    A token that is not a part of the text, such as one for its beginning, has an empty place.
    """
    data = text.encode("utf-8", "replace")
    found = []
    at = num_chars = 0
    for token_id, piece in zip(ids, pieces, strict=True):
        if not data.startswith(piece, at):
            # Some tokenizers put a space before the text.
            bare = piece.removeprefix(b" ")
            piece = bare if data.startswith(bare, at) else b""
        start = num_chars
        at += len(piece)
        # A character counts where it begins.
        num_chars += sum(byte & 0xC0 != 0x80 for byte in piece)
        found.append({"id": token_id, "text": text[start:num_chars], "start": start, "stop": num_chars})
    return found

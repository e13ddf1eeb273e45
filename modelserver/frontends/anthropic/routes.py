"""Anthropic's API beside the others: `POST /v1/messages`, and how many tokens its prompt would have."""

from __future__ import annotations

from dataclasses import replace

from modelserver.auth.access import ApiGroup
from modelserver.frontends.anthropic.answers import MessageWriter
from modelserver.frontends.anthropic.errors import AnthropicErrors
from modelserver.frontends.anthropic.request import read_conversation, read_request
from modelserver.frontends.anthropic.schemas import SCHEMAS, TYPES
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llm.answering import answer, prepare
from modelserver.frontends.llm.edge import Call, CallEdge
from modelserver.frontends.llm.models import find_model
from modelserver.frontends.llm.prompts import conversation_input, token_ids_of
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.limits import HttpLimits


class Anthropic:
    """The handlers of the API. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._errors = AnthropicErrors()
        framing = replace(SSE, error_name="error")
        self._edge = CallEdge(dataplane, limits, errors=self._errors, framing=framing)

    def api(self) -> Api:
        """The routes. The lists of models are OpenAI's."""
        handler = self._edge.handler
        return Api(
            "Anthropic",
            (
                Route("POST", "/v1/messages", handler(self.messages), ApiGroup.INFERENCE),
                Route("POST", "/v1/messages/count_tokens", handler(self.count_tokens), ApiGroup.INFERENCE),
            ),
            self._errors,
            beginnings=("/v1/messages",),
        ).described(SCHEMAS, TYPES)

    async def messages(self, call: Call) -> None:
        """Answer a conversation. Raises ServerError for what goes wrong before the answer begins."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        request = read_request(call.fields, model)
        prepared = await prepare(self._dataplane, model, request.call, call)
        await answer(self._dataplane, prepared, call, MessageWriter(prepared, call, request.stops))

    async def count_tokens(self, call: Call) -> None:
        """Answer with the number of tokens of the same prompt; nothing is generated. Raises ServerError."""
        model = await find_model(self._dataplane, call.fields.text("model"), "tokenizes")
        conversation = read_conversation(call.fields, model)
        prompt = await conversation_input(self._dataplane, model, conversation, call.picture_urls)
        # A template has written the special tokens.
        adds = False if "text_input" in prompt else None
        (ids,) = await token_ids_of(self._dataplane, model, [prompt], adds_special_tokens=adds)
        call.answer({"input_tokens": len(ids)})

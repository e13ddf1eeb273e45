"""The routes of responses: making one, and those that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import ApiGroup
from modelserver.errors import ServerError
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llm.answering import answer, prepare
from modelserver.frontends.llm.edge import Call, CallEdge
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import find_model
from modelserver.frontends.llm.prompts import conversation_input, token_ids_of
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.openai.limits import OpenAiLimits
from modelserver.frontends.openai.responses.answers import ResponseWriter
from modelserver.frontends.openai.responses.request import read_conversation, read_items, read_request
from modelserver.frontends.openai.responses.store import ResponseStore
from modelserver.frontends.openai.responses.tools import read_tools
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import json_response

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane

Document = dict[str, Any]


class Responses:
    """The handlers. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, http_limits: HttpLimits, limits: OpenAiLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits
        self._store = ResponseStore()
        framing = replace(SSE, error_name="error")
        self._edge = CallEdge(dataplane, http_limits, errors=OpenAiErrors(), framing=framing)

    def routes(self) -> tuple[Route, ...]:
        """A kept response belongs to its key, so that reading it needs no more than making it did."""
        group, handler = ApiGroup.INFERENCE, self._edge.handler
        return (
            Route("POST", "/v1/responses", handler(self.create), group),
            Route("POST", "/v1/responses/input_tokens", handler(self.count_tokens), group),
            Route("GET", "/v1/responses/{response_id}", self._get, group),
            Route("DELETE", "/v1/responses/{response_id}", self._delete, group),
            Route("GET", "/v1/responses/{response_id}/input_items", self._input_items, group),
            Route("POST", "/v1/responses/{response_id}/cancel", self._cancel, group),
        )

    async def create(self, call: Call) -> None:
        """Answer a call. Raises ServerError for what goes wrong before the answer begins."""
        fields = call.fields
        earlier, num_bytes = self._earlier(fields)
        model = await find_model(self._dataplane, fields.text("model"))
        request = read_request(fields, self._limits, earlier)
        prepared = await prepare(self._dataplane, model, request.call, call)
        writer = ResponseWriter(request, prepared, call)
        try:
            await answer(self._dataplane, prepared, call, writer)
        except ServerError as error:
            if not writer.is_begun:
                raise
            await call.finish(writer.failed(error))
            return
        if request.is_stored:
            items = [*earlier, *request.items]
            self._store.add(writer.document(), items, num_bytes + call.num_bytes + writer.num_bytes)

    async def count_tokens(self, call: Call) -> None:
        """Answer with the number of tokens of the same prompt; nothing is generated. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "tokenizes")
        items = [*self._earlier(fields)[0], *read_items(fields)]
        conversation = read_conversation(fields, items, read_tools(fields, self._limits))
        prompt = await conversation_input(self._dataplane, model, conversation, call.picture_urls)
        # A template has written the special tokens.
        adds = False if "text_input" in prompt else None
        (ids,) = await token_ids_of(self._dataplane, model, [prompt], adds_special_tokens=adds)
        call.answer({"object": "response.input_tokens", "input_tokens": len(ids)})

    def _earlier(self, fields: Fields) -> tuple[list[Document], int]:
        """The items of the response that the call follows, and of those before it, and how large they are."""
        previous_id = fields.text("previous_response_id")
        if previous_id is None:
            return [], 0
        previous = self._store.get(previous_id)
        return [*previous.items, *previous.document["output"]], previous.num_bytes

    def _get(self, exchange: HttpExchange, response_id: str) -> None:
        exchange.respond(json_response(self._store.get(response_id).document))

    def _delete(self, exchange: HttpExchange, response_id: str) -> None:
        self._store.remove(response_id)
        exchange.respond(json_response({"id": response_id, "object": "response", "deleted": True}))

    def _input_items(self, exchange: HttpExchange, response_id: str) -> None:
        items = [{"id": f"item_{number}", **item} for number, item in enumerate(self._store.get(response_id).items)][
            ::-1
        ]
        ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
        exchange.respond(json_response({"object": "list", "data": items, **ends, "has_more": False}))

    def _cancel(self, _exchange: HttpExchange, response_id: str) -> None:
        self._store.get(response_id)
        raise ParameterError(
            "only a response with background: true can be cancelled, and this server makes none: close the connection "
            "of a response to end it",
            "response_id",
        )

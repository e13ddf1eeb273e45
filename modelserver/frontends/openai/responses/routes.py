"""The routes of responses: making one, and those that are kept."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from modelserver.auth.access import ApiGroup
from modelserver.core.json_pieces import text_slices
from modelserver.core.long_work import Slices, finish, long_work
from modelserver.errors import ServerError
from modelserver.frontends.http.body import MAX_BYTES_ON_LOOP
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llm.answering import Prepared, answer, prepare
from modelserver.frontends.llm.edge import MAX_BYTES_WRITTEN_ON_LOOP, Call, CallEdge, LaterAnswers, query_value
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import find_model
from modelserver.frontends.llm.prompts import conversation_input, token_ids_of
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.openai.responses.answers import ResponseWriter, parts_of
from modelserver.frontends.openai.responses.background import BackgroundRun, BackgroundRuns
from modelserver.frontends.openai.responses.conversations import Conversations, KeptItems, kept_items
from modelserver.frontends.openai.responses.request import (
    ResponseRequest,
    conversation_slices,
    read_conversation_id,
    read_items,
    request_slices,
)
from modelserver.frontends.openai.responses.store import OwnedStore, StoredResponse
from modelserver.frontends.openai.responses.tools import read_tools
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import JSON_HEADERS, HttpResponse, json_response

logger = logging.getLogger(__name__)

Document = dict[str, Any]
T = TypeVar("T")

# Of the number of an event.
_MAX_DIGITS = 12


class Responses:
    """The handlers. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._store = OwnedStore[StoredResponse](
            "Response", "the server keeps the last 1000 responses for an hour, except those with store: false"
        )
        self._framing = replace(SSE, error_name="error")
        errors = OpenAiErrors()
        self._edge = CallEdge(dataplane, limits, errors=errors, framing=self._framing)
        self._later = LaterAnswers(errors)
        self._conversations = Conversations(self._edge)
        self._runs = BackgroundRuns()
        self._followers: set[asyncio.Task[None]] = set()  # kept, because the event loop does not

    def routes(self) -> tuple[Route, ...]:
        """A kept response belongs to its key, so that reading it needs no more than making it did."""
        group, handler = ApiGroup.INFERENCE, self._edge.handler
        self._dataplane.call_at_shutdown(self._runs.cancel)
        return (
            Route("POST", "/v1/responses", handler(self.create), group),
            Route("POST", "/v1/responses/input_tokens", handler(self.count_tokens), group),
            Route("GET", "/v1/responses/{response_id}", self._get, group),
            Route("DELETE", "/v1/responses/{response_id}", self._delete, group),
            Route("GET", "/v1/responses/{response_id}/input_items", self._input_items, group),
            Route("POST", "/v1/responses/{response_id}/cancel", self._cancel, group),
            *self._conversations.routes(),
        )

    async def create(self, call: Call) -> None:
        """Answer a call. Raises ServerError for what goes wrong before the answer begins."""
        fields = call.fields
        earlier, num_bytes = self._earlier(fields)
        model = await find_model(self._dataplane, fields.text("model"))
        request = await _beside(request_slices(fields, earlier), num_bytes + call.num_bytes)
        # What the conversation keeps is there when the answer is, so that the next turn may follow at once.
        asked = [] if request.conversation_id is None else request.items
        turn = await _beside(kept_items(asked), call.num_bytes)
        prepared = await prepare(self._dataplane, model, request.call, call)
        writer = ResponseWriter(request, prepared, call)
        items = [*earlier, *request.items]
        if writer.is_streamed and call.num_bytes > MAX_BYTES_ON_LOOP:
            await long_work().run(writer.encode_head())
        if request.is_background:
            await self._create_in_background(call, request, prepared, writer, items, num_bytes, turn)
            return
        try:
            await answer(self._dataplane, prepared, call, writer)
        except ServerError as error:
            if not writer.is_begun:
                raise
            writer.fail(error)
            await call.finish(parts_of(writer.take_frames()))
            return
        if request.is_stored:
            size = num_bytes + call.num_bytes + writer.num_bytes
            self._store.add(StoredResponse(id=writer.id, made=writer.document(), items=items, num_bytes=size))
        self._note_turn(request, turn, writer)

    async def _create_in_background(
        self,
        call: Call,
        request: ResponseRequest,
        prepared: Prepared,
        writer: ResponseWriter,
        items: list[Document],
        num_bytes: int,
        turn: KeptItems,
    ) -> None:
        """Answer at once, or by the events as they come; the response is made whether the client stays or not."""
        stored = StoredResponse(id=writer.id, made={}, items=items, num_bytes=num_bytes + call.num_bytes)
        self._runs.check_room()

        def end() -> None:
            self._store.use(stored, writer.num_bytes)
            if run.document["status"] in ("completed", "incomplete"):
                self._note_turn(request, turn, writer)

        run = BackgroundRun(prepared, writer, partial(self._store.use, stored), end)
        stored.run = run
        self._store.add(stored)
        self._runs.begin(run, self._dataplane, prepared)
        if not run.is_streamed:
            await call.answer_beside(run.document, call.num_bytes)
            return
        async for part in run.parts(0):
            if not call.send(part):
                await call.wait_for_room()
        await call.finish()

    def _note_turn(self, request: ResponseRequest, turn: KeptItems, writer: ResponseWriter) -> None:
        """Add what was said to the conversation that the response is a turn of, unless that was deleted meanwhile."""
        if request.conversation_id is None:
            return
        try:
            conversation = self._conversations.get(request.conversation_id)
            self._conversations.extend(conversation, turn, writer.output)
        except ServerError as error:
            logger.warning("a turn of conversation %s is not kept: %s", request.conversation_id, error.message)

    async def count_tokens(self, call: Call) -> None:
        """Answer with the number of tokens of the same prompt; nothing is generated. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "tokenizes")
        earlier, num_bytes = self._earlier(fields)
        items = [*earlier, *read_items(fields)]
        slices = conversation_slices(fields, items, read_tools(fields))
        conversation = await _beside(slices, num_bytes + call.num_bytes)
        prompt = await conversation_input(self._dataplane, model, conversation, call.picture_urls)
        # A template has written the special tokens.
        adds = False if "text_input" in prompt else None
        (ids,) = await token_ids_of(self._dataplane, model, [prompt], adds_special_tokens=adds)
        call.answer({"object": "response.input_tokens", "input_tokens": len(ids)})

    def _earlier(self, fields: Fields) -> tuple[list[Document], int]:
        """The items of the response or conversation that the call follows, and how large they are with what a response
        keeps besides."""
        if (conversation_id := read_conversation_id(fields)) is not None:
            conversation = self._conversations.get(conversation_id)
            return [*conversation.items], conversation.num_bytes
        previous_id = fields.text("previous_response_id")
        if previous_id is None:
            return [], 0
        previous = self._store.get(previous_id)
        return [*previous.items, *previous.document["output"]], previous.num_bytes

    def _get(self, exchange: HttpExchange, response_id: str) -> None:
        """The response as it is now; or, with `stream=true`, its events from one after `starting_after` on."""
        stored, query = self._store.get(response_id), exchange.head.query
        if query_value(query, "stream").lower() not in ("true", "1"):
            self._respond(exchange, stored.document, stored.num_bytes)
            return
        if stored.run is None or not stored.run.is_streamed:
            raise ParameterError(
                "only a response that was made with background: true and stream: true can be streamed later", "stream"
            )
        text = query_value(query, "starting_after")
        if text and not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS):
            raise ParameterError(f"'starting_after' must be the number of an event, got {text!r:.60}", "starting_after")
        follow = self._follow(exchange, stored.run, int(text) + 1 if text else 0)
        task = asyncio.get_running_loop().create_task(follow, name="response-events")
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)
        exchange.on_disconnect = task.cancel  # type: ignore[assignment]  # its result is ignored

    async def _follow(self, exchange: HttpExchange, run: BackgroundRun, start: int) -> None:
        writer = exchange.start(200, self._framing.headers)
        try:
            async for part in run.parts(start):
                await writer.write(part)
        except ConnectionError:
            return
        await writer.close()

    def _delete(self, exchange: HttpExchange, response_id: str) -> None:
        self._store.remove(response_id)
        exchange.respond(json_response({"id": response_id, "object": "response", "deleted": True}))

    def _input_items(self, exchange: HttpExchange, response_id: str) -> None:
        stored = self._store.get(response_id)
        items = [{"id": f"item_{number}", **item} for number, item in enumerate(stored.items)][::-1]
        ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
        self._respond(exchange, {"object": "list", "data": items, **ends, "has_more": False}, stored.num_bytes)

    def _cancel(self, exchange: HttpExchange, response_id: str) -> None:
        """As OpenAI's, cancelling one that is over changes nothing."""
        stored = self._store.get(response_id)
        run = stored.run
        if run is None:
            raise ParameterError(
                "only a response with background: true can be cancelled: close the connection of another to end it",
                "response_id",
            )
        run.cancel()
        self._respond(exchange, run.document, stored.num_bytes)

    def _respond(self, exchange: HttpExchange, document: Document, num_bytes: int) -> None:
        """Answer, now or later, by a document of about that many bytes."""
        if num_bytes <= MAX_BYTES_WRITTEN_ON_LOOP:
            exchange.respond(json_response(document))
        else:
            self._later.begin(exchange, _written(document))


async def _written(document: Document) -> HttpResponse:
    return HttpResponse(200, JSON_HEADERS, tuple(await long_work().run(text_slices(document))))


async def _beside(slices: Slices[T], num_bytes: int) -> T:
    """Do work on JSON of about that size: beside the event loop, if it is long."""
    return finish(slices) if num_bytes <= MAX_BYTES_ON_LOOP else await long_work().run(slices)

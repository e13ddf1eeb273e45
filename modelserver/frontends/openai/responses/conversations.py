"""The routes of conversations: items that are kept between responses, and in order."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.auth.access import ApiGroup
from modelserver.core.long_work import Slices, finish, long_work
from modelserver.errors import NotFoundError
from modelserver.frontends.llm.edge import Call, CallEdge, query_value
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.openai.responses.items import ITEMS_OF_SLICE, MAX_ITEMS, Messages
from modelserver.frontends.openai.responses.request import read_metadata
from modelserver.frontends.openai.responses.store import Conversation, OwnedStore
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import json_response

Document = dict[str, Any]

_MAX_BYTES = 8 << 20
_MAX_PAGE = 100
_DEFAULT_PAGE = 20
# What stands before the number of an item that came without an id.
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


class Conversations:
    """The handlers, and what responses ask. Called from the event loop thread."""

    def __init__(self, edge: CallEdge) -> None:
        self._edge = edge
        self._store = OwnedStore[Conversation](
            "Conversation", "the server keeps the last 1000 conversations, for an hour after their last use"
        )

    def routes(self) -> tuple[Route, ...]:
        """A conversation belongs to its key, so that it needs no more than the responses in it."""
        group, handler, path = ApiGroup.INFERENCE, self._edge.handler, "/v1/conversations/{conversation_id}"
        return (
            Route("POST", "/v1/conversations", handler(self.create), group),
            Route("GET", path, self._get, group),
            Route("POST", path, self._update, group),
            Route("DELETE", path, self._delete, group),
            Route("POST", f"{path}/items", self._add, group),
            Route("GET", f"{path}/items", self._list, group),
            Route("GET", f"{path}/items/{{item_id}}", self._get_item, group),
            Route("DELETE", f"{path}/items/{{item_id}}", self._delete_item, group),
        )

    def get(self, conversation_id: str) -> Conversation:
        """One of the caller's. Raises NotFoundError."""
        found = self._store.get(conversation_id)
        self._store.use(found)
        return found

    def extend(self, conversation: Conversation, asked: KeptItems, output: Sequence[Document]) -> None:
        """Add the items of a turn at its end. Raises ParameterError for more than a conversation may hold."""
        made = finish(kept_items(output))
        self._add_kept(conversation, KeptItems(asked.items + made.items, asked.num_bytes + made.num_bytes))

    def _add_kept(self, conversation: Conversation, added: KeptItems) -> None:
        if len(conversation.items) + len(added.items) > MAX_ITEMS or (
            conversation.num_bytes + added.num_bytes > _MAX_BYTES
        ):
            raise ParameterError(
                f"the conversation would be too long: at most {MAX_ITEMS} items and {_MAX_BYTES >> 20} MiB are kept; "
                "delete items, or begin another one",
                "conversation",
            )
        conversation.items += added.items
        self._store.use(conversation, added.num_bytes)

    async def create(self, call: Call) -> None:
        """Make a conversation. Raises ParameterError."""
        added = await _read_items(call.fields)
        conversation = Conversation(
            id="conv_" + secrets.token_hex(24),
            num_bytes=0,
            created_s=call.created_s,
            metadata=read_metadata(call.fields) or {},
        )
        self._add_kept(conversation, added)
        self._store.add(conversation)
        call.answer(conversation.described())

    def _update(self, exchange: HttpExchange, conversation_id: str) -> None:
        async def update(call: Call) -> None:
            conversation = self.get(conversation_id)
            conversation.metadata = read_metadata(call.fields) or {}
            call.answer(conversation.described())

        self._edge.handler(update)(exchange)

    def _add(self, exchange: HttpExchange, conversation_id: str) -> None:
        async def add(call: Call) -> None:
            self.get(conversation_id)
            call.fields.need("items", "an array of items")
            added = await _read_items(call.fields)
            self._add_kept(self.get(conversation_id), added)
            call.answer(_page(added.items, has_more=False))

        self._edge.handler(add)(exchange)

    def _get(self, exchange: HttpExchange, conversation_id: str) -> None:
        exchange.respond(json_response(self.get(conversation_id).described()))

    def _delete(self, exchange: HttpExchange, conversation_id: str) -> None:
        self._store.remove(conversation_id)
        exchange.respond(json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True}))

    def _list(self, exchange: HttpExchange, conversation_id: str) -> None:
        """The newest items first, unless `order` is asc; `after` is the id of the last one that the client has."""
        query, items = exchange.head.query, self.get(conversation_id).items
        text, order, after = (query_value(query, name) for name in ("limit", "order", "after"))
        if text and not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MAX_PAGE):
            raise ParameterError(f"'limit' must be a number from 1 to {_MAX_PAGE}, got {text!r:.60}", "limit")
        if order not in ("", "asc", "desc"):
            raise ParameterError(f"'order' must be asc or desc, got {order!r:.60}", "order")
        ordered = items if order == "asc" else items[::-1]
        if after:
            place = next((place for place, item in enumerate(ordered) if item["id"] == after), None)
            if place is None:
                raise ParameterError(f"'after' must be the id of an item, got {after!r:.60}", "after")
            ordered = ordered[place + 1 :]
        limit = int(text) if text else _DEFAULT_PAGE
        exchange.respond(json_response(_page(ordered[:limit], has_more=len(ordered) > limit)))

    def _get_item(self, exchange: HttpExchange, conversation_id: str, item_id: str) -> None:
        _, item = self._item(conversation_id, item_id)
        exchange.respond(json_response(item))

    def _delete_item(self, exchange: HttpExchange, conversation_id: str, item_id: str) -> None:
        conversation, item = self._item(conversation_id, item_id)
        conversation.items.remove(item)
        self._store.use(conversation, -_size(item))
        exchange.respond(json_response(conversation.described()))

    def _item(self, conversation_id: str, item_id: str) -> tuple[Conversation, Document]:
        conversation = self.get(conversation_id)
        for item in conversation.items:
            if item["id"] == item_id:
                return conversation, item
        raise NotFoundError(f"Item with id '{item_id:.100}' not found in the conversation")


@dataclass(frozen=True, slots=True)
class KeptItems:
    """Items as they are kept, and their size as JSON."""

    items: list[Document]
    num_bytes: int


async def _read_items(fields: Fields) -> KeptItems:
    """Items as responses take them. Raises ParameterError for one that no response would take."""

    def read() -> Slices[KeptItems]:
        items = fields.objects("items", MAX_ITEMS) or ()
        messages = Messages(None)
        for number, item in enumerate(items):
            if number % ITEMS_OF_SLICE == 0:
                yield
            messages.add(item)
        return (yield from kept_items([dict(item.document) for item in items]))

    return await long_work().run(read())


def kept_items(items: Sequence[Document]) -> Slices[KeptItems]:
    """The items of responses as a conversation keeps them."""
    kept, num_bytes = [], 0
    for number, item in enumerate(items):
        if number % ITEMS_OF_SLICE == 0:
            yield
        kept.append(_kept(item))
        num_bytes += _size(kept[-1])
    return KeptItems(kept, num_bytes)


def _size(item: Document) -> int:
    return len(orjson.dumps(item))


def _kept(item: Document) -> Document:
    """The item as it is told: with an id, and of a message with its content as parts."""
    kind = item.get("type") or "message"
    found = {**item, "type": kind}
    if not isinstance(found.get("id"), str):
        found["id"] = _PREFIXES.get(kind, "item_") + secrets.token_hex(24)
    if kind == "message":
        found.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            found["content"] = [{"type": part, "text": item["content"]}]
    return found


def _page(items: Sequence[Document], *, has_more: bool) -> Document:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }

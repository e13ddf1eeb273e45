"""`POST /v1/chat/completions`: the conversation is one request to the model; its events become chunks, or one answer.

Both come from the same events, so that a streamed answer is the other one in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from modelserver.frontends.http.framing import Framing, PreparedFrame
from modelserver.frontends.llm.answering import News, Prepared, answer, prepare
from modelserver.frontends.llm.choices import Choice, Said
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Event, Finish, ToolDelta
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.prompts import conversation_input, token_ids_of
from modelserver.frontends.llm.tools import ToolUse
from modelserver.frontends.openai.answer_parts import (
    ChoicesWriter,
    Envelope,
    chat_logprobs,
    prompt_logprobs_document,
    usage_document,
)
from modelserver.frontends.openai.chat_request import ChatRequest, read_chat
from modelserver.planes.authorized import AnyDataPlane


class Chat:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def serve(self, call: Call) -> None:
        """Answer `call`. Raises ServerError for what goes wrong before the answer begins."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        chat = read_chat(call.fields)
        prepared = await prepare(self._dataplane, model, chat.call, call)
        kind = "chat.completion.chunk" if chat.call.is_streamed else "chat.completion"
        envelope = Envelope(call.make_id("chatcmpl-"), kind, call.created_s, model.answers_as)
        ids = await self._prompt_token_ids(model, chat, call) if chat.call.has_token_ids else None
        await answer(self._dataplane, prepared, call, ChatWriter(chat, prepared, envelope, call.framing, ids))

    async def _prompt_token_ids(self, model: LanguageModel, chat: ChatRequest, call: Call) -> list[int]:
        assert chat.call.conversation is not None, "a chat has one"
        prompt = await conversation_input(self._dataplane, model, chat.call.conversation, call.picture_urls)
        adds = chat.call.adds_special_tokens
        return (await token_ids_of(self._dataplane, model, [prompt], adds_special_tokens=adds))[0]


class ChatWriter(ChoicesWriter):
    """Of a chat."""

    def __init__(
        self,
        chat: ChatRequest,
        prepared: Prepared,
        envelope: Envelope,
        framing: Framing,
        prompt_token_ids: list[int] | None,
    ) -> None:
        """`prompt_token_ids` are told at the beginning, if at all."""
        super().__init__(chat.options, prepared, envelope, framing)
        self._prompt_token_ids = prompt_token_ids
        self._has_prompt_logprobs = chat.call.num_prompt_logprobs is not None
        (self._sources,) = prepared.choices
        self._choices = [_ChatChoice(chat, choice) for choice in self._sources]

    def _other_frames(self, news: News) -> bytes:
        chunks = [chunk for choice, events in news for chunk in self._chunks(choice, events)]
        if chunks and self._prompt_token_ids is not None:
            chunks[0]["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        return b"".join(self._framing.frame(orjson.dumps(chunk)) for chunk in chunks)

    def note(self, news: News) -> None:
        for choice, events in news:
            self._choices[choice.number].said.add(events)

    def document(self) -> dict[str, Any]:
        usage = usage_document(self._usage)
        document = self._envelope.around([choice.document() for choice in self._choices], usage)
        if self._has_prompt_logprobs:
            found = next((choice.prompt_logprobs for choice in self._sources if choice.prompt_logprobs), None)
            document["prompt_logprobs"] = prompt_logprobs_document(found)
        if self._prompt_token_ids is not None:
            document["prompt_token_ids"] = self._prompt_token_ids
        return document

    def _chunks(self, choice: Choice, events: Sequence[Event]) -> list[dict[str, Any]]:
        written = self._choices[choice.number]
        chunks = [self._around(part) for part in written.chunks(events)]
        self._prepare_frame(
            choice, lambda: written.chunk({"content": PreparedFrame.MARK}), has_tokens=written.has_tokens
        )
        return chunks


class _ChatChoice:
    """What is written of one choice. `said` is what was said since."""

    def __init__(self, chat: ChatRequest, choice: Choice) -> None:
        self.chat = chat
        self.said = Said()
        self.has_tokens = chat.call.num_logprobs is not None or chat.call.has_token_ids
        self._choice = choice
        self._is_begun = False

    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """More of it as choices of chunks; none while it is not certain what it is."""
        said = self.said
        said.add(events)
        found = []
        if not self._is_begun:
            self._is_begun = True
            found.append(self.chunk({"role": "assistant", "content": ""}))
        if not said.is_silent:
            found.append(self.chunk(self._delta(), has_tokens=True))
            said.forget_text()
        if said.finish is not None:
            # The tokens of what was dropped, such as tags, come at the end.
            found.append(self.chunk({}, has_tokens=bool(said.logprobs or said.token_ids), finish=said.finish))
            said.finish = None
        return found

    def chunk(self, delta: dict[str, Any], *, has_tokens: bool = False, finish: Finish | None = None) -> dict[str, Any]:
        """A chunk's choice, with the tokens since the last one that had some."""
        reason = None if finish is None else self._reason(finish)
        chunk: dict[str, Any] = {
            "index": self._choice.number,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
        }
        if finish is not None:
            chunk["stop_reason"] = finish.stop_reason
        if has_tokens:
            chunk["logprobs"] = self._logprobs()
            if self.chat.call.has_token_ids:
                chunk["token_ids"] = self.said.token_ids
            self.said.forget_tokens()
        return chunk

    def document(self) -> dict[str, Any]:
        """The whole, as a choice of an answer."""
        said = self.said
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.calls:
            if self.chat.tools.is_legacy:
                message["function_call"] = {"name": said.calls[0].name, "arguments": said.calls[0].arguments}
            else:
                message["tool_calls"] = [_call_document(call) for call in said.calls]
            message["content"] = said.text or None
        if self._choice.has_reasoning:
            if said.reasoning and not said.text:
                message["content"] = None
            message["reasoning"] = message["reasoning_content"] = said.reasoning or None
        finish = said.finish
        choice: dict[str, Any] = {
            "index": self._choice.number,
            "message": message,
            "logprobs": self._logprobs(),
            "finish_reason": None if finish is None else self._reason(finish),
            "stop_reason": None if finish is None else finish.stop_reason,
        }
        if self.chat.call.has_token_ids:
            choice["token_ids"] = said.token_ids
        return choice

    def _reason(self, finish: Finish) -> str:
        tools = self.chat.tools
        is_call = finish.has_calls and finish.reason == "stop" and tools.use is not ToolUse.NAMED
        called = "function_call" if tools.is_legacy else "tool_calls"
        return called if is_call else finish.reason

    def _delta(self) -> dict[str, Any]:
        said = self.said
        document: dict[str, Any] = {}
        if said.reasoning:
            document["reasoning"] = document["reasoning_content"] = said.reasoning
        if said.text:
            document["content"] = said.text
        if said.calls and self.chat.tools.is_legacy:
            document["function_call"] = _legacy_delta(said.calls)
        elif said.calls:
            document["tool_calls"] = [_call_delta(call) for call in said.calls]
        return document

    def _logprobs(self) -> dict[str, Any] | None:
        if self.chat.call.num_logprobs is None:
            return None
        by_id = self.chat.options.names_tokens_by_id
        return {"content": chat_logprobs(self.said.logprobs, by_id=by_id), "refusal": None}


def _call_document(call: ToolDelta) -> dict[str, Any]:
    """As an item of `message.tool_calls`."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    """As an item of `delta.tool_calls`. Each call has one in a chunk: clients look at the first of a call only."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _legacy_delta(calls: Sequence[ToolDelta]) -> dict[str, str]:
    """More of the one call of a function."""
    arguments = "".join(call.arguments for call in calls)
    name = next((call.name for call in calls if call.name), "")
    return {"name": name, "arguments": arguments} if name else {"arguments": arguments}

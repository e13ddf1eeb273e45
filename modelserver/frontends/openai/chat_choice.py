"""One choice of a chat, as it grows: pieces -> the delta of a chunk, or the message of the whole answer.

Both come from the same readers, so that a streamed answer is the other one in pieces.
"""

from __future__ import annotations

from typing import Any

from modelserver.frontends.llm.events import Delta, ToolDelta, ToolReader
from modelserver.frontends.llm.pieces import Piece, TokenLogprob
from modelserver.frontends.llm.reasoning import ReasoningFormat, ReasoningReader
from modelserver.frontends.llm.tool_constrained import NamedToolReader, RequiredToolReader
from modelserver.frontends.llm.tool_formats import ToolFormat
from modelserver.frontends.llm.tool_text import ToolTextReader
from modelserver.frontends.llm.tools import ToolUse
from modelserver.frontends.openai.chat_request import ChatRequest
from modelserver.frontends.openai.logprobs import chat_logprobs


class ChatChoice:
    """Choice number `index`; the formats are those of the model, None where it has none."""

    def __init__(
        self, chat: ChatRequest, index: int, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None
    ) -> None:
        self.index = index
        self.is_finished = False
        self._chat = chat
        self._tools = _tool_reader(chat, tool_format)
        self._reasoning = _reasoning_reader(chat, reasoning)
        # What was noted and not told yet.
        self._delta = Delta(content=chat.echo)
        self._entries: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._reasonings: list[str] = []
        # All tokens, of a model whose reasoning can be told apart.
        self._all_token_ids: list[int] = []
        self._has_calls = False
        self._is_begun = False

    def take(self, piece: Piece) -> None:
        """Note what the model says."""
        if self.is_finished:
            return
        if self._reasoning is not None:
            self._all_token_ids += piece.token_ids or ()
            self._note(self._reasoning.push(piece.text))
        else:
            self._note_content(piece.text)
        self._entries += piece.logprobs or ()
        self._token_ids += piece.token_ids or ()
        if piece.finish_reason:
            self.finish(piece.finish_reason, piece.stop_reason)

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """Nothing follows."""
        if self._reasoning is not None:
            self._note(self._reasoning.finish())
        if self._tools is not None:
            self._add(self._tools.finish())
        self.is_finished = True
        tools = self._chat.tools
        is_call = self._has_calls and reason == "stop" and tools.use is not ToolUse.NAMED
        called = "function_call" if tools.is_legacy else "tool_calls"
        self._finish_reason, self._stop_reason = called if is_call else reason, stop_reason

    def chunks(self) -> list[dict[str, Any]]:
        """What was noted since the last time, as choices of chunks; none while it is not certain what it is."""
        found = []
        if not self._is_begun:
            self._is_begun = True
            found.append(self._chunk({"role": "assistant", "content": ""}))
        if not self._delta.is_empty:
            found.append(self._chunk(self._take_delta(), has_tokens=True))
        if self._finish_reason is not None:
            # The tokens of what was dropped, such as tags, come at the end.
            has_tokens = bool(self._entries or self._token_ids)
            found.append(self._chunk({}, has_tokens=has_tokens, finish_reason=self._finish_reason))
            self._finish_reason = None
        return found

    def choice(self) -> dict[str, Any]:
        """The whole, as a choice of an answer."""
        delta = self._delta
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.calls:
            calls = _joined(delta.calls)
            if self._chat.tools.is_legacy:
                message["function_call"] = calls[0]["function"]
            else:
                message["tool_calls"] = calls
            message["content"] = delta.content or None
        if self._reasoning is not None:
            if delta.reasoning and not delta.content:
                message["content"] = None
            reasoning = delta.reasoning or None
            message["reasoning"] = message["reasoning_content"] = reasoning
        choice: dict[str, Any] = {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(),
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._chat.options.has_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far, told or not; None if the model has none that could be told apart."""
        return None if self._reasoning is None else "".join(self._reasonings)

    def count_reasoning(self, start: list[int], end: list[int]) -> int | None:
        """How many tokens the reasoning is, by those of its tags; None if that cannot be told from tokens."""
        if self._reasoning is None or not self._all_token_ids:
            return None
        return self._reasoning.count(self._all_token_ids, start, end)

    def _note(self, delta: Delta) -> None:
        if delta.reasoning:
            self._reasonings.append(delta.reasoning)
        if self._chat.has_reasoning:
            self._delta.reasoning += delta.reasoning
        if delta.content:
            self._note_content(delta.content)

    def _note_content(self, text: str) -> None:
        self._add(self._tools.push(text) if self._tools is not None else Delta(content=text))

    def _add(self, delta: Delta) -> None:
        self._delta.content += delta.content
        self._delta.calls += delta.calls
        self._has_calls = self._has_calls or bool(delta.calls)

    def _take_delta(self) -> dict[str, Any]:
        delta, self._delta = self._delta, Delta()
        document: dict[str, Any] = {}
        if delta.reasoning:
            document["reasoning"] = document["reasoning_content"] = delta.reasoning
        if delta.content:
            document["content"] = delta.content
        if delta.calls and self._chat.tools.is_legacy:
            document["function_call"] = _legacy_call(delta.calls)
        elif delta.calls:
            document["tool_calls"] = [call.document() for call in _merged(delta.calls)]
        return document

    def _chunk(
        self, delta: dict[str, Any], *, has_tokens: bool = False, finish_reason: str | None = None
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            chunk["stop_reason"] = self._stop_reason
        if has_tokens:
            chunk["logprobs"] = self._logprobs()
            if self._chat.options.has_token_ids:
                chunk["token_ids"] = self._token_ids
            self._entries, self._token_ids = [], []
        return chunk

    def _logprobs(self) -> dict[str, Any] | None:
        options = self._chat.options
        if options.num_logprobs is None:
            return None
        return {"content": chat_logprobs(self._entries, by_id=options.names_tokens_by_id), "refusal": None}


def _tool_reader(chat: ChatRequest, tool_format: ToolFormat | None) -> ToolReader | None:
    tools = chat.tools
    if tools.use is ToolUse.NAMED:
        return NamedToolReader(tools.name)
    if tools.use is ToolUse.REQUIRED:
        return RequiredToolReader()
    if tools.use is ToolUse.AUTO and tool_format is not None:
        return ToolTextReader(tool_format, tools.functions, is_parallel=tools.is_parallel)
    return None


def _reasoning_reader(chat: ChatRequest, tags: ReasoningFormat | None) -> ReasoningReader | None:
    if tags is None:
        return None
    # Constrained text has no room for reasoning, and begins with the answer.
    is_inside = tags.is_implicit and not chat.is_structured and not chat.is_thinking_disabled
    return ReasoningReader(tags, is_inside=is_inside)


def _legacy_call(calls: list[ToolDelta]) -> dict[str, str]:
    """More of the one call of a function."""
    arguments = "".join(call.arguments for call in calls)
    name = next((call.name for call in calls if call.name), "")
    return {"name": name, "arguments": arguments} if name else {"arguments": arguments}


def _merged(calls: list[ToolDelta]) -> list[ToolDelta]:
    """One for each call: clients look at the first item of a delta only."""
    merged: dict[int, ToolDelta] = {}
    for call in calls:
        first = merged.setdefault(call.index, call)
        if first is not call:
            first.arguments += call.arguments
    return list(merged.values())


def _joined(calls: list[ToolDelta]) -> list[dict[str, Any]]:
    """The calls that deltas make up."""
    found: list[dict[str, Any]] = []
    for call in calls:
        if call.id:
            function = {"name": call.name, "arguments": call.arguments}
            found.append({"id": call.id, "type": "function", "function": function})
        else:
            found[call.index]["function"]["arguments"] += call.arguments
    return found

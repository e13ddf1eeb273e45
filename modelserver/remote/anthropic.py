"""Anthropic's Messages API as a client speaks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from modelserver.backend import InvalidArgumentError
from modelserver.remote.chat_text import AnswerText, Ask, CallForm, ChatTransport
from modelserver.remote.openai import arguments_text

VERSION = "2023-06-01"
# The API wants a bound; a client that names none gets this one.
DEFAULT_MAX_TOKENS = 4096
_SENT = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "stop", "max_tokens": "length"}


class AnthropicTransport(ChatTransport):
    _models_path = "/v1/models"

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        found = {"anthropic-version": VERSION, **headers}
        key = found.pop("authorization", "").removeprefix("Bearer ")
        if key:
            found["x-api-key"] = key
        return found

    def _question(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        if ask.structure is not None or ask.sampling.get("n", 1) != 1:
            raise InvalidArgumentError("Anthropic's API has neither constraints on the text nor several choices")
        document: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.sampling.get("max_tokens") or DEFAULT_MAX_TOKENS,
            "stream": True,
            **{name: ask.sampling[ours] for ours, name in _SENT.items() if ours in ask.sampling},
        }
        stop = ask.sampling.get("stop")
        if stop:
            document["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
        messages = ask.messages or [{"role": "user", "content": ask.prompt}]
        system = [_plain(message) for message in messages if message.get("role") in ("system", "developer")]
        if system:
            document["system"] = "\n\n".join(system)
        document["messages"] = _turns(messages)
        if ask.tools:
            document["tools"] = [
                {
                    "name": tool["function"]["name"],
                    "description": tool["function"].get("description", ""),
                    "input_schema": tool["function"].get("parameters") or {"type": "object", "properties": {}},
                }
                for tool in ask.tools
            ]
        if ask.form is CallForm.LISTED:
            document["tool_choice"] = {"type": "any"}
        elif ask.form is CallForm.ARGUMENTS:
            document["tool_choice"] = {"type": "tool", "name": ask.function}
        return "/v1/messages", document

    def _take(self, document: dict[str, Any], answer: AnswerText) -> list[tuple[int, str]]:
        writer, text = answer.choice(0), ""
        match document["type"]:
            case "message_start":
                self._count(document["message"].get("usage") or {}, answer)
            case "content_block_start":
                block = document["content_block"]
                text = (
                    writer.call(block["name"]) if block["type"] == "tool_use" else writer.say(block.get("text") or "")
                )
            case "content_block_delta":
                delta = document["delta"]
                text = writer.reason(delta.get("thinking") or "") + writer.say(delta.get("text") or "")
                text += writer.argue(delta.get("partial_json") or "")
            case "message_delta":
                self._count(document.get("usage") or {}, answer)
                reason = document["delta"].get("stop_reason")
                if reason:
                    answer.finish_reasons[0] = _REASONS.get(reason, reason)
        return [(0, text)]

    def _count(self, usage: Mapping[str, Any], answer: AnswerText) -> None:
        if "input_tokens" in usage:
            cached = usage.get("cache_read_input_tokens") or 0
            answer.usage.num_cached = cached
            answer.usage.num_input = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
        if "output_tokens" in usage:
            answer.usage.num_output = usage["output_tokens"]


def _plain(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation in turns of user and assistant; results of tools are the user's."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            continue
        blocks: list[dict[str, Any]] = []
        if role == "tool":
            called = message.get("tool_call_id") or "call_0"
            blocks = [{"type": "tool_result", "tool_use_id": called, "content": _plain(message)}]
        elif text := _plain(message):
            blocks = [{"type": "text", "text": text}]
        for number, call in enumerate(message.get("tool_calls") or ()):
            try:
                arguments = orjson.loads(arguments_text(call["function"].get("arguments")))
            except ValueError:
                raise InvalidArgumentError("messages: the arguments of a call are not JSON") from None
            name = call["function"]["name"]
            blocks.append(
                {"type": "tool_use", "id": call.get("id") or f"call_{number}", "name": name, "input": arguments}
            )
        role = "assistant" if role == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return turns

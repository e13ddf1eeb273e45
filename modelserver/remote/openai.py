"""OpenAI's API as a client speaks it: chat completions, and completions for prompts without a conversation."""

from __future__ import annotations

from typing import Any

import orjson

from modelserver.backend import InvalidArgumentError
from modelserver.remote.chat_text import AnswerText, Ask, CallForm, ChatTransport, Usage

# OpenAI's own newer models take this name of the bound only; other servers take the older one.
_OWN_HOST = "api.openai.com"
# What the server's own language models take and others do not know.
_UNSENT = frozenset({"skip_special_tokens", "logprobs", "prompt_logprobs"})


class OpenAiTransport(ChatTransport):
    def _question(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        sampling = {name: value for name, value in ask.sampling.items() if name not in _UNSENT}
        if "max_tokens" in sampling and self._pool.address.host == _OWN_HOST and ask.messages:
            sampling["max_completion_tokens"] = sampling.pop("max_tokens")
        document: dict[str, Any] = {
            "model": self._model,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not ask.messages:
            if ask.structure is not None:
                document |= _structure(ask.structure)
            return "/completions", {**document, "prompt": ask.prompt}
        document["messages"] = [_message(message) for message in ask.messages]
        if ask.tools:
            document["tools"] = ask.tools
        if ask.form is CallForm.LISTED:
            document["tool_choice"] = "required"
        elif ask.form is CallForm.ARGUMENTS:
            document["tool_choice"] = {"type": "function", "function": {"name": ask.function}}
        if ask.structure is not None:
            document |= _structure(ask.structure)
        return "/chat/completions", document

    def _take(self, document: dict[str, Any], answer: AnswerText) -> list[tuple[int, str]]:
        usage = document.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            answer.usage = Usage(
                usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens")
            )
        texts = []
        for choice in document["choices"]:
            index = int(choice.get("index", 0))
            writer = answer.choice(index)
            delta = choice.get("delta") or {}
            text = writer.reason(delta.get("reasoning_content") or delta.get("reasoning") or "")
            text += writer.say(choice.get("text") or delta.get("content") or delta.get("refusal") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if function.get("name"):
                    text += writer.call(function["name"])
                text += writer.argue(function.get("arguments") or "")
            texts.append((index, text))
            if choice.get("finish_reason"):
                reason = str(choice["finish_reason"])
                answer.finish_reasons[index] = "stop" if reason in ("tool_calls", "function_call") else reason
        return texts


def _structure(structure: dict[str, Any]) -> dict[str, Any]:
    """A constraint on the text, as OpenAI has it, or else as vLLM has it."""
    if "json_object" in structure:
        return {"response_format": {"type": "json_object"}}
    schema = structure.get("json")
    if schema is None:
        return {"structured_outputs": structure}
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except ValueError:
            raise InvalidArgumentError("structured_outputs: the schema is not JSON") from None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with what every server takes: arguments of calls are text, and calls have ids."""
    found = {
        name: message[name] for name in ("role", "content", "name", "tool_call_id") if message.get(name) is not None
    }
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{number}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": arguments_text(call["function"].get("arguments")),
                },
            }
            for number, call in enumerate(calls)
        ]
        found.setdefault("content", None)
    if found.get("role") == "tool":
        found.setdefault("tool_call_id", "call_0")
    return found


def arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()

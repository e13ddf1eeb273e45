"""Chat templates of a checkpoint: their choice and variables, with the same results as in transformers and Ollama.

A template is only ever read from the model's directory, never from a request; messages are untrusted all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from modelserver.backend import InvalidArgumentError

from .ollama_template import OllamaTemplate
from .template_sandbox import SandboxedTemplate, TemplateLimits

# Marks where the last message ends in what the template makes of it.
_END_MARK = "END_OF_FINAL_MESSAGE_MARK "
# The names under which templates look for the reasoning of a message; the first is the standard one.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# Parts of a conversation that have their own place in a request, and are not further arguments of the template.
_CONVERSATION_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# What templates in Jinja write around calls -> the format, by its name in the parameter `tool_parser`. All marks of a
# row must be there; the first row that fits counts.
_TOOL_MARKS = (
    (("<longcat_tool_call>",), "longcat"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), "deepseek_v3"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|tool_call|>",), "granite"),
    (("<|action_start|>",), "internlm"),
    (("<|python_tag|>",), "llama3_json"),
)


def tool_parser_of(template: str) -> str:
    """How a model writes calls, by what its template in Jinja makes of earlier ones; empty if that shows none."""
    if "tool_calls" not in template:
        return ""
    return next((name for marks, name in _TOOL_MARKS if all(mark in template for mark in marks)), "")


# The tokens that have a name, as transformers calls them.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of tokenizer_config.json, and of special_tokens_map.json where the first has none.

    Either a string or the description of an added token with a "content".
    """
    named: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name) or special_tokens_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


class ChatTemplates:
    """The templates of one directory by name: "default", perhaps "tool_use"; compiled when first used.

    A template in Go's language, `ollama`, takes the place of all of them. `history` are messages put before every
    conversation, and `system` the system message of those that begin without one.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: TemplateLimits | None = None,
        *,
        ollama: OllamaTemplate | None = None,
        system: str = "",
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._limits = limits or TemplateLimits()
        self._compiled: dict[str, SandboxedTemplate] = {}
        self._ollama = ollama
        self._system = system
        self._history = tuple(history)

    def with_conversation(
        self, *, ollama: OllamaTemplate | None, system: str, history: Sequence[Mapping[str, Any]]
    ) -> ChatTemplates:
        """The same templates, with what a Modelfile says of conversations."""
        return ChatTemplates(
            self._sources, self._special_tokens, self._limits, ollama=ollama, system=system, history=history
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    @property
    def writes_special_tokens(self) -> bool:
        """Whether the text has the tokens that begin and end it; templates in Go's language leave them to others."""
        return self._ollama is None

    @property
    def default(self) -> str:
        """The text of the usual template; empty if there is none."""
        return self._ollama.source if self._ollama is not None else self._sources.get("default", "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        picture: str | None = None,
    ) -> str:
        """The text. `picture` stands for pictures where the template knows no parts; without it there must be none.

        Raises InvalidArgumentError for wrong messages, or with the template's own error."""
        template: SandboxedTemplate | None = None
        if self._ollama is None:
            template = self._template("tool_use" if tools is not None and "tool_use" in self._sources else "default")
        if continue_final_message and add_generation_prompt:
            raise InvalidArgumentError(
                "continue_final_message and add_generation_prompt exclude each other: one continues the last message, "
                "the other begins a new one"
            )
        for name in sorted(_CONVERSATION_NAMES.intersection(variables or ())):
            raise InvalidArgumentError(f"chat_template_kwargs must not have '{name}', which has a place of its own")
        conversation = [_checked_message(message, place) for place, message in enumerate(messages)]
        if not conversation:
            raise InvalidArgumentError("messages must have at least one message")
        conversation = self._with_history(conversation)
        if template is None or not template.reads_content_parts:
            conversation = [_joined_content(message, place, picture) for place, message in enumerate(conversation)]
        elif template.needs_content_parts:
            conversation = [_with_parts(message) for message in conversation]
        if picture is None:
            _refuse_pictures(conversation)
        if continue_final_message:
            _mark_end(conversation[-1])
        conversation = [_with_reasoning(message) for message in conversation]
        further = _plain(dict(variables or {}), "chat_template_kwargs")
        plain_tools = None if tools is None else _plain(list(tools), "tools")
        if template is None:
            assert self._ollama is not None, "one of both is there"
            text = self._ollama.render(conversation, plain_tools, further)
        else:
            text = template.render(
                {
                    **self._special_tokens,
                    **further,
                    "messages": conversation,
                    "tools": plain_tools,
                    "documents": None if documents is None else _plain(list(documents), "documents"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        return _cut_at_mark(text) if continue_final_message else text

    def _with_history(self, conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        begins_with_system = conversation[0]["role"] == "system"
        conversation = [*(dict(message) for message in self._history), *conversation]
        if self._system and not begins_with_system:
            return [{"role": "system", "content": self._system}, *conversation]
        return conversation

    def _template(self, name: str) -> SandboxedTemplate:
        source = self._sources.get(name)
        if source is None:
            known = f"; it has only {', '.join(self._sources)}" if self._sources else ""
            raise InvalidArgumentError(
                "this model has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja)"
                f"{known}: send text instead of messages, or add one to the model's directory"
            )
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = SandboxedTemplate(source, self._limits)
        return compiled


def _plain(value: Any, name: str) -> Any:
    """A copy made of JSON's types only: a template can reach nothing else through it."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    raise InvalidArgumentError(f"{name} may hold JSON values only, it holds a {type(value).__name__}")


def _checked_message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A message without empty fields. The arguments of its tool calls become objects, which templates expect."""
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(f"messages[{place}] must be an object, it is a {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise InvalidArgumentError(f"messages[{place}] must have a role, a string such as 'user'")
    plain = {key: value for key, value in _plain(message, f"messages[{place}]").items() if value is not None}
    calls = plain.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _tool_arguments(function["arguments"], place)
    return plain


def _tool_arguments(arguments: str, place: int) -> Any:
    """OpenAI's API has the arguments of a call as the text of a JSON object."""
    try:
        return orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"messages[{place}]: the arguments of a tool call are not JSON: {error}") from error


def _joined_content(message: dict[str, Any], place: int, picture: str | None) -> dict[str, Any]:
    """Content in parts becomes one text, for templates that know no parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if picture is not None and _is_picture(part):
            text = picture
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidArgumentError(f"messages[{place}]: content of type {kind!r} is not supported, only text is")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _refuse_pictures(conversation: list[dict[str, Any]]) -> None:
    """The template would write places for pictures, and the conversation has no pictures."""
    for place, message in enumerate(conversation):
        content = message.get("content")
        if isinstance(content, list) and any(map(_is_picture, content)):
            raise InvalidArgumentError(f"messages[{place}] has a picture, and the request has no input 'image'")


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the names that templates read, whichever name the client used."""
    for name in _REASONING_NAMES:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END_MARK
            return
    raise InvalidArgumentError("continue_final_message needs a last message with text, which is to be continued")


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_END_MARK.strip())
    if place < 0:
        raise InvalidArgumentError(
            "continue_final_message: the chat template leaves out the last message, so it cannot be continued"
        )
    if text.startswith(_END_MARK, place):
        return text[:place]
    return text[:place].rstrip()  # the template trims its messages, so what stood before the end goes too

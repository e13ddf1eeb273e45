"""Items of `input` -> the messages that chat templates take. What OpenAI adds in the future is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.prompts import joined_messages
from modelserver.frontends.openai.messages import read_content, read_text

Document = dict[str, Any]

MAX_ITEMS = 8192
# Of items that are read.
ITEMS_OF_SLICE = 128
_MAX_PARTS = 4096
_ROLES = ("user", "assistant", "system", "developer")


class Messages:
    """Builds a conversation. Reasoning, text and calls in a row are one message of the assistant, for templates."""

    def __init__(self, instructions: str | None) -> None:
        self._found: list[Document] = []
        if instructions:
            self._found.append({"role": "system", "content": instructions})
        # What the assistant says until somebody else does, and its texts.
        self._turn: Document | None = None
        self._texts: list[str] = []

    def finish(self) -> list[Document]:
        """The messages."""
        self._end_turn()
        return joined_messages(self._found)

    def add(self, item: Fields) -> None:
        """Raises ParameterError for an item that is malformed or cannot be served."""
        kind = item.text("type") or "message"
        reader = _READERS.get(kind)
        if reader is not None:
            reader(self, item)

    def _message(self, item: Fields) -> None:
        item.need("role", f"one of {', '.join(_ROLES)}")
        role = item.word("role", _ROLES) or ""
        item.need("content", "a string or an array of parts")
        if role == "assistant":
            text = read_text(item, "content") or ""
            if self._turn is not None and "tool_calls" in self._turn:
                self._end_turn()
            self._assistant()
            if self._texts or text:
                self._texts.append(text)
            return
        self._end_turn()
        content = read_content(item, "content") or ""
        self._found.append({"role": "system" if role == "developer" else role, "content": content})

    def _reasoning(self, item: Fields) -> None:
        """Encrypted reasoning of OpenAI's own models means nothing here."""
        parts = item.objects("content", _MAX_PARTS) or item.objects("summary", _MAX_PARTS) or []
        text = "\n".join(part.text("text") or "" for part in parts)
        if not text:
            return
        if self._turn is not None and "tool_calls" in self._turn:
            self._end_turn()
        turn = self._assistant()
        # Templates know it by either name.
        turn["reasoning"] = turn["reasoning_content"] = text

    def _call(self, item: Fields) -> None:
        self._add_call(item, item.text("arguments") or "{}")

    def _custom_call(self, item: Fields) -> None:
        self._add_call(item, orjson.dumps({"input": item.text("input") or ""}).decode())

    def _add_call(self, item: Fields, arguments: str) -> None:
        item.need("name", "the name of a tool")
        try:
            read = orjson.loads(arguments)
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise item.wrong("arguments", "the text of a JSON object", arguments)
        function = {"name": item.text("name"), "arguments": read}
        call = {"id": item.text("call_id") or "", "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _result(self, item: Fields) -> None:
        item.need("call_id", "the call_id of a call")
        item.need("output", "a string or an array of parts")
        self._end_turn()
        message = {"role": "tool", "tool_call_id": item.text("call_id"), "content": read_content(item, "output") or ""}
        self._found.append(message)

    def _assistant(self) -> Document:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self._found.append(self._turn)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None and self._texts:
            self._turn["content"] = "\n".join(self._texts)
        self._turn, self._texts = None, []


_READERS: dict[str, Callable[[Messages, Fields], None]] = {
    "message": Messages._message,
    "reasoning": Messages._reasoning,
    "function_call": Messages._call,
    "custom_tool_call": Messages._custom_call,
    "function_call_output": Messages._result,
    "custom_tool_call_output": Messages._result,
}

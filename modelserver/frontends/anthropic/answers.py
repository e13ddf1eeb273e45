"""Events of a generation -> Anthropic's documents: one message, or the events of a stream that builds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from modelserver.frontends.anthropic.request import read_arguments
from modelserver.frontends.http.framing import PreparedFrame
from modelserver.frontends.llm.answering import EventWriter, News, Prepared
from modelserver.frontends.llm.choices import Choice, Said
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Event, Finish, Reasoning, Text, ToolDelta, ToolEnd

Document = dict[str, Any]

# Clients send thinking back with its signature. It means nothing here.
_SIGNATURE = "modelserver"


class MessageWriter(EventWriter):
    """Writes one choice as content blocks, which never interleave."""

    def __init__(self, prepared: Prepared, call: Call, stops: frozenset[str]) -> None:
        self._usage = prepared.usage
        self._framing = call.framing
        self._stops = stops
        self._id = call.make_id("msg_")
        self._model = call.fields.text("model") or prepared.model.answers_as
        self._finish: Finish | None = None
        self._is_begun = False
        # The open block's type, and the number of blocks that have begun.
        self._open = ""
        self._num_blocks = 0
        # Blank text between blocks, which becomes a part of the next text, if that follows.
        self._blanks = ""
        self._text_frame: PreparedFrame | None = None
        self._blocks: list[Document] = []
        self._said = Said()

    # Streams.

    def text_frame(self, choice: Choice) -> PreparedFrame | None:  # noqa: ARG002 - there is one
        return self._text_frame if self._open == "text" else None

    def frames(self, news: News) -> bytes:
        found = b""
        if not self._is_begun:
            self._is_begun = True
            found = self._event("message_start", message=self._message([], None, None)) + self._event("ping")
        for _, events in news:
            for event in events:
                found += self._write(event)
        return found

    def last_frames(self) -> bytes:
        reason, stop = self._stop()
        end = self._end_block()
        if not self._num_blocks:
            end += self._begin_block("text", {"type": "text", "text": ""}) + self._end_block()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return (
            end + self._event("message_delta", delta=delta, usage=self._usage_document()) + self._event("message_stop")
        )

    def _write(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._write_text(text)
            case Reasoning(text):
                begin = b""
                if self._open != "thinking":
                    thought = {"type": "thinking", "thinking": "", "signature": ""}
                    begin = self._end_block() + self._begin_block("thinking", thought)
                return begin + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolDelta():
                begin = b""
                if event.name:
                    self._blanks = ""
                    block: Document = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                    begin = self._end_block() + self._begin_block("tool_use", block)
                if not event.arguments:
                    return begin
                return begin + self._delta({"type": "input_json_delta", "partial_json": event.arguments})
            case ToolEnd():
                return self._end_block()
            case Finish():
                self._finish = event
        return b""

    def _write_text(self, text: str) -> bytes:
        if self._open == "text":
            assert self._text_frame is not None, "it is made when the block begins"
            return self._text_frame.with_text(text)
        self._blanks += text
        if not self._blanks.strip():
            return b""
        found = self._end_block() + self._begin_block("text", {"type": "text", "text": ""})
        marked = {
            "type": "content_block_delta",
            "index": self._num_blocks - 1,
            "delta": {"type": "text_delta", "text": PreparedFrame.MARK},
        }
        self._text_frame = PreparedFrame(self._framing, marked, "content_block_delta")
        found += self._text_frame.with_text(self._blanks)
        self._blanks = ""
        return found

    def _begin_block(self, kind: str, block: Document) -> bytes:
        self._open = kind
        self._num_blocks += 1
        return self._event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        end = b""
        if self._open == "thinking":
            end = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = ""
        return end + self._event("content_block_stop", index=self._num_blocks - 1)

    def _delta(self, delta: Document) -> bytes:
        return self._event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _event(self, kind: str, **members: Any) -> bytes:
        return self._framing.frame(orjson.dumps({"type": kind, **members}), kind)

    # Whole answers.

    def note(self, news: News) -> None:
        for _, events in news:
            for event in events:
                if isinstance(event, Finish):
                    self._finish = event
            self._note(events)

    def document(self) -> Document:
        self._end_said()
        reason, stop = self._stop()
        return self._message(self._blocks, reason, stop)

    def _note(self, events: Sequence[Event]) -> None:
        """Add to the last block, or begin another."""
        for event in events:
            kind = type(event)
            if (kind is Reasoning and (self._said.text or self._said.calls)) or (kind is Text and self._said.calls):
                self._end_said()
            self._said.add([event])

    def _end_said(self) -> None:
        """Blocks of what was said since the last ones: thinking, text and calls follow each other in this order."""
        said = self._said
        if said.reasoning:
            self._blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": _SIGNATURE})
        if said.text.strip():
            self._blocks.append({"type": "text", "text": said.text})
        for call in said.calls:
            arguments = read_arguments(call.arguments)
            self._blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        said.forget_text()

    # Both.

    def _message(self, blocks: list[Document], reason: str | None, stop: str | None) -> Document:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage_document(),
        }

    def _usage_document(self) -> Document:
        usage = self._usage
        return {
            "input_tokens": max(0, usage.num_input_tokens - usage.num_cached_tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
        }

    def _stop(self) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence`."""
        finish = self._finish
        if finish is None:
            return "end_turn", None
        if finish.has_calls:
            return "tool_use", None
        if finish.reason == "length":
            return "max_tokens", None
        if isinstance(finish.stop_reason, str) and finish.stop_reason in self._stops:
            return "stop_sequence", finish.stop_reason
        return "end_turn", None

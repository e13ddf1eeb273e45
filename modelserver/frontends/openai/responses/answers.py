"""Events of a generation -> a response of items, or the events of a stream that build it."""

from __future__ import annotations

import abc
import secrets
from typing import Any, NamedTuple

import orjson

from modelserver.core.json_pieces import text_slices
from modelserver.core.long_work import Slices
from modelserver.frontends.http.framing import Frames, Framing, PreparedFrame
from modelserver.frontends.llm.answering import EventWriter, News, Prepared
from modelserver.frontends.llm.choices import Choice, Usage
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Event, Finish, Reasoning, Text, Tokens, ToolDelta, ToolEnd
from modelserver.frontends.openai.answer_parts import chat_logprobs
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.openai.responses.request import ResponseRequest
from modelserver.frontends.openai.responses.tools import Origin, ResponseTools

Document = dict[str, Any]


class LongFrame(NamedTuple):
    """A frame with a whole response whose head is long: all of these share the head's parts."""

    start: bytes
    head: list[bytes]
    end: bytes

    @property
    def num_bytes(self) -> int:
        """Without the head."""
        return len(self.start) + len(self.end)


def parts_of(frames: list[bytes | LongFrame]) -> list[bytes]:
    """What is sent, in parts of which none takes long to send; one part if none of the frames is long."""
    if not any(isinstance(frame, LongFrame) for frame in frames):
        return [b"".join(frames)] if frames else []  # type: ignore[arg-type]
    parts: list[bytes] = []
    for frame in frames:
        parts += (frame.start, *frame.head, frame.end) if isinstance(frame, LongFrame) else (frame,)
    return parts


class ResponseWriter(EventWriter):
    """Writes one choice. Whole answers are written as streams are, and only the frames are not made.

    The frames of a stream are numbered from 0 on, in their order.
    """

    def __init__(self, request: ResponseRequest, prepared: Prepared, call: Call) -> None:
        self._usage = prepared.usage
        self._framing = call.framing
        self._tools = request.tools
        self._head: Document = {
            "id": "resp_" + secrets.token_hex(24),
            "object": "response",
            "created_at": call.created_s,
            "background": request.is_background,
            "model": prepared.model.answers_as,
            **request.echoed,
        }
        if request.conversation_id is not None:
            self._head["conversation"] = {"id": request.conversation_id}
        self.num_echoed = call.num_bytes
        self.is_begun = False
        self.output: list[Document] = []
        # About, of the output.
        self.num_bytes = 0
        # Of the tokens whose text comes next.
        self._logprobs: list[Document] = []
        self._open: _Item | None = None
        self._blanks = ""
        self._finish: Finish | None = None
        self._number = 0
        self._frames: list[bytes | LongFrame] = []
        # The JSON of the head without its end, where it is long.
        self._head_text: list[bytes] | None = None
        self.is_streamed = prepared.call.is_streamed

    @property
    def id(self) -> str:
        """Of the response."""
        found: str = self._head["id"]
        return found

    def text_frame(self, choice: Choice) -> PreparedFrame | None:  # noqa: ARG002 - there is one
        return self._open.text_event if isinstance(self._open, _MessageItem) else None

    def encode_head(self) -> Slices[None]:
        """Encode what each event with the whole response repeats of a long request."""
        parts = yield from text_slices(self._head)
        if not parts[-1]:
            parts.pop()
        parts[-1] = parts[-1][:-1]
        self._head_text = parts

    def frames(self, news: News) -> Frames:
        self.advance(news)
        return self._taken()

    def last_frames(self) -> Frames:
        self.finish()
        return self._taken()

    def _taken(self) -> Frames:
        parts = parts_of(self.take_frames())
        return b"".join(parts) if len(parts) < 2 else parts

    def queue(self) -> None:
        """Begin the stream of a response that waits for its turn."""
        for kind in ("created", "queued"):
            self._send_response(f"response.{kind}", self._response("queued"))

    def advance(self, news: News) -> None:
        """Take what a response of the model says; `take_frames` has the frames of it."""
        if not self.is_begun:
            self.is_begun = True
            for kind in ("in_progress",) if self._number else ("created", "in_progress"):
                self._send_response(f"response.{kind}", self._response("in_progress"))
        self.note(news)

    def finish(self) -> Document:
        """The whole answer, and the frame that ends its stream."""
        document = self.document()
        self._send_response(f"response.{document['status']}", document)
        return document

    def take_frames(self) -> list[bytes | LongFrame]:
        """The frames since the last time."""
        frames, self._frames = self._frames, []
        return frames

    def note(self, news: News) -> None:
        for _, events in news:
            # Tokens follow the text that they are of.
            for event in events:
                if isinstance(event, Tokens):
                    self._logprobs += chat_logprobs(event.logprobs, by_id=False)
            for event in events:
                self._write(event)

    def document(self) -> Document:
        is_cut = self._finish is not None and self._finish.reason == "length"
        self._end_item(is_cut=is_cut)
        return self._response("incomplete" if is_cut else "completed")

    def so_far(self, *, is_cancelled: bool = False) -> Document:
        """The response as it is now: its finished items."""
        if is_cancelled:
            return self._response("cancelled")
        return self._response("in_progress" if self.is_begun else "queued")

    def fail(self, error: Exception) -> Document:
        """The response that could not be made, and the frame that ends its stream."""
        described = OpenAiErrors().document(error)
        code = described["error"]["code"] or described["error"]["type"]
        response = self._response("failed") | {"error": {"code": code, "message": described["error"]["message"]}}
        self._send_response("response.failed", response)
        return response

    def send(self, kind: str, **members: Any) -> None:
        """Add an event to the stream, if there is one."""
        if self.is_streamed:
            document = {"type": kind, "sequence_number": self._number, **members}
            self._frames.append(self._framing.frame(orjson.dumps(document), kind))
            self._number += 1

    def _send_response(self, kind: str, response: Document) -> None:
        """Add an event with the whole response."""
        if self._head_text is None or not self.is_streamed:
            self.send(kind, response=response)
            return
        document = {"type": kind, "sequence_number": self._number, "response": PreparedFrame.MARK}
        start, end = self._framing.frame(orjson.dumps(document), kind).split(orjson.dumps(PreparedFrame.MARK))
        rest = orjson.dumps({name: value for name, value in response.items() if name not in self._head})
        self._frames.append(LongFrame(start, self._head_text, b"," + rest[1:] + end))
        self._number += 1

    def text_event(self, item: _MessageItem, **members: Any) -> _TextEvent:
        """The event of more text of an item: its number is a mark, and so is what changes of its members."""
        kind = "response.output_text.delta"
        document = {"type": kind, "sequence_number": PreparedFrame.MARK, **members}
        return _TextEvent(self._framing, document, kind, writer=self, item=item)

    def send_text(self, event: _TextEvent, text: str) -> None:
        """Add it to the stream."""
        self._frames.append(self.numbered(event, text))

    def numbered(self, event: _TextEvent, text: str) -> bytes:
        """The frame of the event, which is the next one."""
        self._number += 1
        return event.with_values(self._number - 1, text)

    def _write(self, event: Event) -> None:
        match event:
            case Text(text):
                self._write_text(text)
            case Reasoning(text):
                if not isinstance(self._open, _ReasoningItem):
                    self._begin_item(_ReasoningItem(self, len(self.output)))
                assert self._open is not None, "it is begun"
                self._logprobs = []
                self._open.add(text)
            case ToolDelta():
                if event.name:
                    self._blanks = ""
                    self._begin_item(_call_item(self, len(self.output), event, self._tools))
                assert self._open is not None, "a call begins with its name"
                self._open.add(event.arguments)
            case ToolEnd():
                self._end_item()
            case Finish():
                self._finish = event

    def _write_text(self, text: str) -> None:
        if not isinstance(self._open, _MessageItem):
            # Blank text between items does not become a message.
            self._blanks += text
            if not self._blanks.strip():
                return
            self._begin_item(_MessageItem(self, len(self.output)))
            text, self._blanks = self._blanks, ""
        assert isinstance(self._open, _MessageItem), "it is begun"
        self._open.add_logprobs(self._logprobs)
        self._logprobs = []
        self._open.add(text)

    def _begin_item(self, item: _Item) -> None:
        self._end_item()
        self._open = item
        item.begin()

    def _end_item(self, *, is_cut: bool = False) -> None:
        if self._open is not None:
            if isinstance(self._open, _MessageItem):
                self._open.add_logprobs(self._logprobs)
            self._logprobs = []
            self.num_bytes += len(self._open.text)
            self.output.append(self._open.end("incomplete" if is_cut else "completed"))
            self._open = None

    def _response(self, status: str) -> Document:
        is_over = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self.output),
            "usage": usage_document(self._usage) if is_over else None,
        }


def usage_document(usage: Usage) -> Document:
    """As `usage` of a response."""
    num_inputs, num_outputs = usage.num_input_tokens, usage.num_output_tokens
    return {
        "input_tokens": num_inputs,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": num_outputs,
        "output_tokens_details": {"reasoning_tokens": min(num_outputs, usage.num_reasoning_tokens or 0)},
        "total_tokens": num_inputs + num_outputs,
    }


class _Item(abc.ABC):
    """One item of the output while it is made."""

    prefix = ""

    def __init__(self, writer: ResponseWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._id = self.prefix + secrets.token_hex(24)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> None:
        self._send("response.output_item.added", item=self.document("in_progress", is_empty=True))

    def add(self, text: str) -> None:
        """More of its text."""
        self._pieces.append(text)

    def end(self, status: str) -> Document:
        """The complete item."""
        item = self.document(status)
        self._writer.send("response.output_item.done", output_index=self._index, item=item)
        return item

    @abc.abstractmethod
    def document(self, status: str, *, is_empty: bool = False) -> Document:
        """The item as it is now; without its text if it `is_empty`."""

    def _send(self, kind: str, **members: Any) -> None:
        self._writer.send(kind, output_index=self._index, **members)

    def _send_part(self, kind: str, **members: Any) -> None:
        """An event of the item's one part."""
        self._send(kind, item_id=self._id, content_index=0, **members)


class _MessageItem(_Item):
    prefix = "msg_"

    def __init__(self, writer: ResponseWriter, index: int) -> None:
        super().__init__(writer, index)
        self._logprobs: list[Document] = []
        self._new_logprobs: list[Document] = []
        # Of a stream, when it has begun.
        self.text_event: _TextEvent | None = None

    def begin(self) -> None:
        super().begin()
        self._send_part("response.content_part.added", part=_text_part("", []))

    def add(self, text: str) -> None:
        super().add(text)
        new, self._new_logprobs = self._new_logprobs, []
        if new or not self._writer.is_streamed:
            self._send_part("response.output_text.delta", delta=text, logprobs=new)
            return
        if self.text_event is None:
            self.text_event = self._writer.text_event(
                self,
                output_index=self._index,
                item_id=self._id,
                content_index=0,
                delta=PreparedFrame.MARK,
                logprobs=[],
            )
        self._writer.send_text(self.text_event, text)

    def take(self, text: str) -> None:
        """More of its text, of which the event is sent."""
        self._pieces.append(text)

    def add_logprobs(self, entries: list[Document]) -> None:
        """Of the piece of text that comes next."""
        self._logprobs += entries
        self._new_logprobs += entries

    def end(self, status: str) -> Document:
        self._send_part("response.output_text.done", text=self.text, logprobs=self._logprobs)
        self._send_part("response.content_part.done", part=_text_part(self.text, self._logprobs))
        return super().end(status)

    def document(self, status: str, *, is_empty: bool = False) -> Document:
        content = [] if is_empty else [_text_part(self.text, self._logprobs)]
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}


class _TextEvent(PreparedFrame):
    """The usual event of a stream: more text of an item, and nothing else."""

    __slots__ = ("_item", "_writer")

    def __init__(
        self, framing: Framing, document: Document, kind: str, *, writer: ResponseWriter, item: _MessageItem
    ) -> None:
        super().__init__(framing, document, kind)
        self._writer = writer
        self._item = item

    def with_text(self, text: str) -> bytes:
        self._item.take(text)
        return self._writer.numbered(self, text)


class _ReasoningItem(_Item):
    prefix = "rs_"

    def begin(self) -> None:
        super().begin()
        self._send_part("response.content_part.added", part={"type": "reasoning_text", "text": ""})

    def add(self, text: str) -> None:
        super().add(text)
        self._send_part("response.reasoning_text.delta", delta=text)

    def end(self, status: str) -> Document:
        self._send_part("response.reasoning_text.done", text=self.text)
        self._send_part("response.content_part.done", part={"type": "reasoning_text", "text": self.text})
        return super().end(status)

    def document(self, status: str, *, is_empty: bool = False) -> Document:
        content = [] if is_empty else [{"type": "reasoning_text", "text": self.text}]
        return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": status}


class _CallItem(_Item):
    prefix = "fc_"

    def __init__(self, writer: ResponseWriter, index: int, call: ToolDelta, origin: Origin) -> None:
        super().__init__(writer, index)
        self._call_id, self._name = call.id, origin.name
        # Clients find a tool of a namespace by both names.
        self._namespace = {} if origin.namespace is None else {"namespace": origin.namespace}

    def add(self, text: str) -> None:
        super().add(text)
        if text:
            self._send("response.function_call_arguments.delta", item_id=self._id, delta=text)

    def end(self, status: str) -> Document:
        kind = "response.function_call_arguments.done"
        self._send(kind, item_id=self._id, name=self._name, arguments=self.text)
        return super().end(status)

    def document(self, status: str, *, is_empty: bool = False) -> Document:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
            "arguments": "" if is_empty else self.text,
        }


class _CustomCallItem(_CallItem):
    """A call of a tool that takes free text, of which the model has written the JSON around it."""

    prefix = "ctc_"

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def input(self) -> str:
        """The free text."""
        try:
            arguments = orjson.loads(self.text)
        except ValueError:
            return self.text
        found = arguments.get("input") if isinstance(arguments, dict) else None
        return found if isinstance(found, str) else self.text

    def end(self, status: str) -> Document:
        self._send("response.custom_tool_call_input.delta", item_id=self._id, delta=self.input)
        self._send("response.custom_tool_call_input.done", item_id=self._id, input=self.input)
        return _Item.end(self, status)

    def document(self, status: str, *, is_empty: bool = False) -> Document:
        return {
            "id": self._id,
            "type": "custom_tool_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
            "input": "" if is_empty else self.input,
        }


def _call_item(writer: ResponseWriter, index: int, call: ToolDelta, tools: ResponseTools) -> _Item:
    # The model may call what is not there.
    origin = tools.origins.get(call.name) or Origin(call.name, None, is_custom=False)
    return (_CustomCallItem if origin.is_custom else _CallItem)(writer, index, call, origin)


def _text_part(text: str, logprobs: list[Document]) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

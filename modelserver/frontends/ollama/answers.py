"""Events of a generation -> Ollama's documents: lines of a stream, or one document.

The same class writes both routes: their documents differ in where text, reasoning and calls stand.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from modelserver.frontends.http.framing import Framing, PreparedFrame
from modelserver.frontends.llm.answering import EventWriter, News, Prepared
from modelserver.frontends.llm.choices import Choice, Said
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Event, Finish, Text, TokenLogprob, ToolDelta, ToolEnd, json_logprob
from modelserver.frontends.llm.tool_formats import loads

Document = dict[str, Any]


class _Clock:
    """Writes the time, of which most is the same within a second."""

    def __init__(self) -> None:
        self._second, self._text = -1, ""

    def now(self) -> str:
        second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second, self._text = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
        return f"{self._text}{nanoseconds // 1000:06d}Z"


_CLOCK = _Clock()


def timestamp() -> str:
    """The time in UTC as Ollama writes it. Event loop thread only."""
    return _CLOCK.now()


class OllamaDurations:
    """The durations of one call, in nanoseconds from when it came."""

    def __init__(self) -> None:
        self._began_ns = self._sent_ns = time.monotonic_ns()
        self._first_ns: int | None = None
        self._num_notes = 0

    def note_sent(self) -> None:
        """The model is loaded and gets the request now."""
        self._sent_ns = time.monotonic_ns()

    def note_text(self) -> None:
        """The model has said more."""
        self._num_notes += 1
        if self._first_ns is None:
            self._first_ns = time.monotonic_ns()

    def loaded(self) -> Document:
        """The durations of a call that only loads a model, or makes embeddings."""
        return self._until(time.monotonic_ns())

    def generated(self, num_inputs: int, num_outputs: int) -> Document:
        """The durations and counts of a generation. If a model says everything at once, all its time is generation."""
        now_ns = time.monotonic_ns()
        first_ns = self._sent_ns if self._first_ns is None or self._num_notes == 1 else self._first_ns
        return {
            **self._until(now_ns),
            "prompt_eval_count": num_inputs,
            "prompt_eval_duration": first_ns - self._sent_ns,
            "eval_count": num_outputs,
            "eval_duration": now_ns - first_ns,
        }

    def _until(self, now_ns: int) -> Document:
        return {"total_duration": now_ns - self._began_ns, "load_duration": self._sent_ns - self._began_ns}


class _TextLine(PreparedFrame):
    """A line of a stream in which only the time and the text change."""

    __slots__ = ("_durations", "_head")

    def __init__(self, framing: Framing, name: str, around: tuple[bytes, bytes], durations: OllamaDurations) -> None:
        """`name` is the model's; `around` is the JSON before and after the text."""
        self._head = framing.before + b'{"model":' + orjson.dumps(name) + b',"created_at":"'
        self._before, self._after = around[0], around[1] + framing.after
        self._between = []
        self._durations = durations

    def with_text(self, text: str) -> bytes:
        self._durations.note_text()
        return self._head + _CLOCK.now().encode() + self._before + orjson.dumps(text) + self._after


class OllamaWriter(EventWriter):
    """Writes one choice. `name` is the model's, as the client called it."""

    # The JSON around a text in a line of a stream: what precedes and what follows it.
    around_text: tuple[bytes, bytes]

    def __init__(self, prepared: Prepared, call: Call, name: str, durations: OllamaDurations) -> None:
        self._usage = prepared.usage
        self._framing = call.framing
        self._name = name
        self._text_line = _TextLine(call.framing, name, self.around_text, durations)
        # Usage is in the first response, which `frames` reads.
        self._has_begun = False
        self._durations = durations
        self._said = Said()
        self._open_calls: dict[int, ToolDelta] = {}
        self._ended_calls: list[Document] = []

    @abc.abstractmethod
    def part(self, text: str, thinking: str, calls: Sequence[Document]) -> Document:
        """What the model says as members of a document."""

    def last_part(self) -> Document:
        """Further members of the last document."""
        return {}

    def text_frame(self, choice: Choice) -> PreparedFrame | None:  # noqa: ARG002 - there is one
        return self._text_line if self._has_begun else None

    def frames(self, news: News) -> bytes:
        found = []
        self._has_begun = True
        for _, events in news:
            if len(events) == 1 and type(events[0]) is Text:
                found.append(self._text_line.with_text(events[0].text))
                continue
            self._durations.note_text()
            self._add(events)
            if self._said.text or self._said.reasoning or self._ended_calls or self._said.logprobs:
                found.append(self._framing.frame(orjson.dumps(self._line())))
        return b"".join(found)

    def last_frames(self) -> bytes:
        return self._framing.frame(orjson.dumps(self._last_line()))

    def note(self, news: News) -> None:
        for _, events in news:
            self._durations.note_text()
            self._add(events)

    def document(self) -> Document:
        return self._last_line()

    def _add(self, events: Sequence[Event]) -> None:
        """Note the events; a call is written when its arguments are complete."""
        for event in events:
            if isinstance(event, ToolDelta):
                known = self._open_calls.setdefault(event.index, ToolDelta(event.index, "", event.id, event.name))
                known.arguments += event.arguments
            elif isinstance(event, ToolEnd):
                self._ended_calls.append(_call(self._open_calls.pop(event.index)))
        self._said.add([event for event in events if not isinstance(event, ToolDelta)])

    def _line(self) -> Document:
        """What was said since the last line."""
        said, calls = self._said, self._ended_calls
        line = {
            "model": self._name,
            "created_at": timestamp(),
            **self.part(said.text, said.reasoning, calls),
            "done": False,
        }
        if said.logprobs:
            line["logprobs"] = logprobs_document(said.logprobs)
        said.forget_text()
        said.forget_tokens()
        self._ended_calls = []
        return line

    def _last_line(self) -> Document:
        finish = self._said.finish
        return {
            **self._line(),
            "done": True,
            "done_reason": _reason(finish),
            **self.last_part(),
            **self._durations.generated(self._usage.num_input_tokens, self._usage.num_output_tokens),
        }


class ChatWriter(OllamaWriter):
    """Writes `message`."""

    around_text = (b'","message":{"role":"assistant","content":', b'},"done":false}')

    def part(self, text: str, thinking: str, calls: Sequence[Document]) -> Document:
        message: Document = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class GenerateWriter(OllamaWriter):
    """Writes `response`, and last the tokens of the conversation so far, which the next call may send as `context`."""

    around_text = (b'","response":', b',"done":false}')

    def __init__(
        self, prepared: Prepared, call: Call, name: str, durations: OllamaDurations, prompt_token_ids: list[int] | None
    ) -> None:
        super().__init__(prepared, call, name, durations)
        self._context = prompt_token_ids

    def part(self, text: str, thinking: str, calls: Sequence[Document]) -> Document:  # noqa: ARG002 - prompts have no tools
        part: Document = {"response": text}
        if thinking:
            part["thinking"] = thinking
        return part

    def last_part(self) -> Document:
        return {} if self._context is None else {"context": self._context}

    def _add(self, events: Sequence[Event]) -> None:
        super()._add(events)
        if self._context is not None:
            self._context += self._said.token_ids
            self._said.token_ids = []


def logprobs_document(entries: Sequence[TokenLogprob]) -> list[Document]:
    """As `logprobs` of a document."""
    return [{**_logprob(entry), "top_logprobs": [_logprob(top) for top in entry["top"] or ()]} for entry in entries]


def _logprob(entry: TokenLogprob) -> Document:
    return {"token": entry["token"], "logprob": json_logprob(entry), "bytes": entry.get("bytes")}


def _call(delta: ToolDelta) -> Document:
    """A call whose arguments are complete; Ollama has them as an object."""
    try:
        arguments = loads(delta.arguments or "{}")
    except ValueError:
        arguments = delta.arguments
    function = {"index": delta.index, "name": delta.name, "arguments": arguments}
    return {"id": delta.id, "function": function}


def _reason(finish: Finish | None) -> str:
    return finish.reason if finish is not None else "stop"

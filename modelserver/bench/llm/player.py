"""Requests to a language model in a load process: lanes that read events, and their records."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

from modelserver.bench.feed import Feed
from modelserver.bench.llm.results import Call, pack_calls
from modelserver.bench.player import Player
from modelserver.bench.recorder import Recorder
from modelserver.bench.work import Collected, EndpointType, LlmWork, Share
from modelserver.client.address import Address
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Answers, Lane
from modelserver.wire.context import Arena

DONE = b"[DONE]"
# Names that Triton's models give to their text.
_TEXT_OUTPUTS = ("text_output", "output", "text", "OUTPUT")


class EventReader:
    """Cuts a stream into the data of its events."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        buffer = (self._pending + piece).replace(b"\r\n", b"\n")
        # A line end may be cut in two.
        tail = b"\r" if buffer.endswith(b"\r") else b""
        *events, self._pending = buffer[: len(buffer) - len(tail)].split(b"\n\n")
        self._pending += tail
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """The content of one event. `has_text`: it contains output; token counts are None if it has none."""

    has_text: bool = False
    is_done: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


def read_chunk(endpoint_type: EndpointType, data: bytes) -> Chunk:
    """Parse an event's data; unreadable data gives an error."""
    if data == DONE:
        return Chunk(is_done=True)
    try:
        document = json.loads(data)
    except ValueError:
        return Chunk(error=f"an event is not JSON: {data[:80].decode(errors='replace')}")
    if not isinstance(document, dict):
        return Chunk(error=f"an event is not a JSON object: {data[:80].decode(errors='replace')}")
    if document.get("error"):
        error = document["error"]
        return Chunk(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))
    if endpoint_type is EndpointType.GENERATE:
        text = next((document[name] for name in _TEXT_OUTPUTS if name in document), "")
        return Chunk(has_text=bool(text))
    usage = document.get("usage") or {}
    return Chunk(
        has_text=any(_has_text(choice) for choice in document.get("choices") or ()),
        input_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
    )


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("message") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or delta.get("tool_calls")
    )


class EventLane(HttpLane):
    """A connection whose answers are streams of events; an answer in one piece counts as one event."""

    def __init__(self, address: Address, answers: Answers, arena: Arena, endpoint_type: EndpointType) -> None:
        super().__init__(address, answers, arena)
        self._endpoint_type = endpoint_type
        self._events = EventReader()
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.is_done = False
        self.problem = ""

    def send(self, request: bytes) -> None:
        self._events = EventReader()
        self.response_times = []
        self.input_tokens = self.output_tokens = None
        self.is_done = False
        self.problem = ""
        # Bodies are handed to `take`, whatever their length.
        self.keeps_answer = True
        super().send(request)

    def take(self, piece: bytes, now_ns: int) -> None:
        super().take(piece, now_ns)
        for data in self._events.feed(piece):
            self._note(read_chunk(self._endpoint_type, data), now_ns)

    def take_whole(self, now_ns: int) -> None:
        """An answer that was not a stream: all of its text arrived at its end."""
        if not self.response_times and not self.problem and self.answer.lstrip().startswith(b"{"):
            self._note(read_chunk(self._endpoint_type, self.answer), now_ns)

    def _note(self, chunk: Chunk, now_ns: int) -> None:
        if chunk.error and not self.problem:
            self.problem = chunk.error
        if chunk.has_text:
            self.response_times.append(now_ns)
        if chunk.input_tokens is not None:
            self.input_tokens = chunk.input_tokens
        if chunk.output_tokens is not None:
            self.output_tokens = chunk.output_tokens
        self.is_done = self.is_done or chunk.is_done


class EventLanes(Answers):
    """The connections of a load process."""

    def __init__(self, work: LlmWork) -> None:
        self._work = work
        self._lanes: list[EventLane] = []
        self._arena = Arena()

    async def take(self, num_lanes: int, answers: Answers) -> list[Lane]:
        new = [self._make() for _ in range(num_lanes - len(self._lanes))]
        await asyncio.gather(*(lane.connect() for lane in new))
        self._lanes += new
        return [self._use(index, answers) for index in range(num_lanes)]

    async def grow(self, index: int, answers: Answers) -> Lane:
        del index
        lane = self._make()
        await lane.connect()
        self._lanes.append(lane)
        return self._use(len(self._lanes) - 1, answers)

    async def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def _make(self) -> EventLane:
        return EventLane(self._work.address, self, self._arena, self._work.endpoint_type)

    def _use(self, index: int, answers: Answers) -> Lane:
        lane = self._lanes[index]
        lane.answers = answers
        lane.index = index
        lane.due_ns = 0
        return lane

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        """An answer after its load has ended."""

    def responded(self, lane: Lane) -> None:
        """Responses are noted by their lane."""


class PromptFeed:
    """The requests in turn; each of several processes takes every n-th."""

    def __init__(self, work: LlmWork, share: Share) -> None:
        self._requests = work.requests
        self._next = share.index
        self._stride = share.num_workers

    def next(self, lane: Lane) -> bytes:
        lane.step = self._next % len(self._requests)
        self._next += self._stride
        return self._requests[lane.step]


class CallRecorder:
    """Remembers calls with the times of their chunks."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failures: Counter[str] = Counter()
        self.failure_times = array("q")

    def prepare(self, lane: Lane) -> None:
        """Lanes keep their answers anyway."""

    def record(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        assert isinstance(lane, EventLane), "language models have their own lanes"
        if failure is None:
            lane.take_whole(now_ns)
            failure = lane.problem or ("the answer has no text" if not lane.response_times else None)
        lane.answer = b""
        if failure is not None:
            self.failures[failure] += 1
            self.failure_times.append(now_ns)
            return
        self.calls.append(
            Call(
                lane.due_ns or lane.start_ns,
                lane.start_ns,
                now_ns,
                lane.step,
                lane.response_times,
                lane.input_tokens,
                lane.output_tokens,
            )
        )


class LlmPlayer(Player):
    """Prompts."""

    def __init__(self, work: LlmWork, share: Share) -> None:
        super().__init__(EventLanes(work), share, seed=work.seed, may_grow=True)
        self._work = work
        self._recorder = CallRecorder()

    def _prepare(self) -> tuple[Feed, Recorder]:
        self._recorder = CallRecorder()
        return PromptFeed(self._work, self._share), self._recorder

    def collect(self) -> Collected:
        recorder = self._recorder
        calls, recorder.calls = recorder.calls, []
        failures, recorder.failures = recorder.failures, Counter()
        times, recorder.failure_times = recorder.failure_times, array("q")
        return Collected(
            cpu_s=time.process_time(),
            is_over=self._is_over,
            failure_times=times.tobytes(),
            failures=dict(failures),
            calls=pack_calls(calls),
        )

"""Checks answers in a load process, and keeps their records until the bench collects them."""

from __future__ import annotations

from typing import Protocol

from modelserver.bench.checker import problem_of
from modelserver.bench.feed import TensorFeed
from modelserver.bench.records import Records
from modelserver.bench.work import Transport, Work
from modelserver.client.lane import Lane


class Recorder(Protocol):
    """Receives every answer from the driver of a load."""

    def prepare(self, lane: Lane) -> None:
        """`lane` is about to be used by this load."""

    def record(self, lane: Lane, now_ns: int, failure: str | None) -> None: ...


class TensorRecorder:
    """Reads the first answer of every lane in full; all of them, where there is something to compare with."""

    def __init__(self, work: Work, feed: TensorFeed) -> None:
        self._work = work
        self._feed = feed
        self._is_streamed = work.transport is Transport.STREAM
        self._checks_all = any(template.expected for stream in work.streams for template in stream)
        self.records = Records()

    def prepare(self, lane: Lane) -> None:
        lane.keeps_answer = True

    def record(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        if lane.keeps_answer:
            if failure is None:
                failure = problem_of(lane, self._work, self._feed.template(lane.step))
                lane.keeps_answer = self._checks_all
            lane.answer = b""
        records = self.records
        if failure is not None:
            records.fail(now_ns, failure)
            return
        start_ns = lane.start_ns
        records.times.extend((lane.due_ns or start_ns, start_ns, lane.sent_ns, lane.first_ns, now_ns))
        if self._is_streamed:
            records.num_responses.append(len(lane.response_times))
            records.response_times.extend(lane.response_times)

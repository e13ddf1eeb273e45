"""Checks answers in a load process, and keeps their records until the bench collects them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from modelserver.bench.feed import TensorFeed
from modelserver.bench.work import Template, Transport, Work
from modelserver.client.grpc_messages import unframe
from modelserver.client.http_lane import HttpLane
from modelserver.client.infer_answer import grpc_outputs, http_outputs
from modelserver.client.lane import Lane
from modelserver.pb import grpc_service_pb2 as pb

MAX_SHOWN = 8


def problem_of(lane: Lane, work: Work, template: Template) -> str | None:
    """The problem of the answer that `lane` has kept; None if it is correct."""
    try:
        outputs = _outputs(lane, work)
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"the answer cannot be read: {type(error).__name__}: {error}"
    missing = [name for name in work.output_names if name not in outputs]
    if missing and not work.is_decoupled:
        return f"the answer lacks output '{missing[0]}' (it has {', '.join(sorted(outputs)) or 'none'})"
    for name, expected in template.expected.items():
        if name not in outputs:
            return f"the answer lacks output '{name}', which validation_data gives"
        actual = outputs[name]
        if actual is not None and actual != expected:
            return f"output '{name}' is not what validation_data says: {_difference(expected, actual)}"
    return None


def _difference(expected: bytes, actual: bytes) -> str:
    if len(expected) != len(actual):
        return f"expected {len(expected)} bytes, got {len(actual)}"
    place = next(place for place in range(len(expected)) if expected[place] != actual[place])
    shown = slice(place, place + MAX_SHOWN)
    return f"from byte {place} on expected {expected[shown].hex()}, got {actual[shown].hex()}"


def _outputs(lane: Lane, work: Work) -> Mapping[str, bytes | None]:
    """The outputs' bytes by name; None for an output without bytes."""
    if work.transport is Transport.HTTP:
        assert isinstance(lane, HttpLane), "HTTP has its own lanes"
        _, outputs = http_outputs(lane.answer, lane.json_len)
    elif work.transport is Transport.GRPC:
        outputs = grpc_outputs(pb.ModelInferResponse.FromString(unframe(lane.answer, work.algorithm)))
    elif lane.answer:
        outputs = grpc_outputs(pb.ModelStreamInferResponse.FromString(lane.answer).infer_response)
    else:
        outputs = []
    return {output.name: output.raw for output in outputs}


# Records of answered requests in a load process: five times each, and failures.
# due, started, sent, first byte, end: monotonic clock, ns.
NUM_TIMES = 5
MAX_KINDS_OF_FAILURE = 50


@dataclass(slots=True)
class Records:
    """Answers since the records were last taken."""

    times: array[int] = field(default_factory=lambda: array("q"))
    # Of streamed responses only: how many each request had, and when they came.
    num_responses: array[int] = field(default_factory=lambda: array("q"))
    response_times: array[int] = field(default_factory=lambda: array("q"))
    failure_times: array[int] = field(default_factory=lambda: array("q"))
    failures: Counter[str] = field(default_factory=Counter)

    def fail(self, now_ns: int, failure: str) -> None:
        self.failure_times.append(now_ns)
        if len(self.failures) >= MAX_KINDS_OF_FAILURE and failure not in self.failures:
            failure = "other failures"
        self.failures[failure] += 1

    def take(self) -> Records:
        """Take all records so far, and clear them."""
        taken = Records(self.times, self.num_responses, self.response_times, self.failure_times, self.failures)
        self.times, self.num_responses, self.response_times = array("q"), array("q"), array("q")
        self.failure_times, self.failures = array("q"), Counter()
        return taken


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

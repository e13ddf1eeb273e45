"""Records of answered requests in a load process: five times each, and failures."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

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

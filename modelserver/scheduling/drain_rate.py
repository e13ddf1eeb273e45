"""How fast a queue empties while there is something in it, and so how long what comes now will wait."""

from __future__ import annotations

from math import ceil, exp

# Older observations count for less: by 1/e after so much time with a queue, but of slow models by a fifth per batch.
_MEMORY_NS = 1_000_000_000
_LEAST_KEPT = 0.8
# An answer that comes too late was computed in vain, so that what is a mean is not enough.
_MARGIN = 1.2
# Batches that must have left a queue behind before anything is concluded.
_FEWEST = 3.0
# So many batches in a row that none was left waiting for, and the time above: what was observed is of another day.
# Who is refused leaves no queue behind either, so that a model slow at first would stay so for ever.
_MOST_ALONE = 5


class DrainRate:
    """Requests that leave the queue per time; time in which the queue is empty does not count.

    Every call is made under the batcher's lock, or on its loop where a number that is a moment old does no harm.
    """

    __slots__ = ("_last_ns", "_noted_ns", "_num_alone", "_num_batches", "_num_requests", "_span_ns")

    def __init__(self) -> None:
        # When a batch was last taken that left others behind; 0: the queue was empty since.
        self._last_ns = 0
        # When something was last observed, and the batches since.
        self._noted_ns = 0
        self._num_alone = 0
        self._num_batches = 0.0
        self._num_requests = 0.0
        self._span_ns = 0.0

    def note(self, num_taken: int, num_left: int, now_ns: int) -> None:
        """A batch of so many requests was taken, and so many wait on."""
        last_ns = self._last_ns
        self._last_ns = now_ns if num_left else 0
        if not last_ns:
            self._num_alone += 1
            if self._num_alone >= _MOST_ALONE and now_ns - self._noted_ns > _MEMORY_NS:
                self._num_batches = self._num_requests = self._span_ns = 0.0
            return
        self._noted_ns = now_ns
        self._num_alone = 0
        span_ns = now_ns - last_ns
        kept = max(exp(-span_ns / _MEMORY_NS), _LEAST_KEPT)
        self._num_batches = self._num_batches * kept + 1.0
        self._num_requests = self._num_requests * kept + num_taken
        self._span_ns = self._span_ns * kept + span_ns

    def per_request_ns(self, now_ns: int) -> float | None:
        """The time in which one request leaves the queue; None as long as too little is known.

        A queue that nobody has taken from for longer than usual is slower than it was.
        """
        if self._num_batches < _FEWEST:
            return None
        span_ns = self._span_ns
        if self._last_ns:
            overdue_ns = now_ns - self._last_ns
            if overdue_ns * self._num_batches > 2 * span_ns:
                span_ns += overdue_ns
        return span_ns / self._num_requests

    def retry_after_s(self, num_waiting: int, now_ns: int) -> float:
        """When a queue of this length will be empty, if nothing comes; a second if that is not known."""
        each_ns = self.per_request_ns(now_ns)
        return 1.0 if each_ns is None else max(1, ceil(num_waiting * each_ns / 1_000_000)) / 1000


def expected_ns(each_ns: float, num_ahead: int, num_executing: int, *, is_answer: bool) -> float:
    """How long a request will wait with so many before it, and with `is_answer` until it is answered.

    Those that execute are halfway through, in the mean; to execute takes as long as it takes that many to leave
    the queue (Little's law). A wait is what is expected, an answer is there by then almost certainly.
    """
    wait_ns = each_ns * (num_ahead + num_executing * 0.5)
    return _MARGIN * (wait_ns + each_ns * num_executing) if is_answer else wait_ns

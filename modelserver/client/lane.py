"""A lane: a place where one request at a time is in flight. A connection of HTTP/1.1, or a stream of HTTP/2."""

from __future__ import annotations

import abc
import asyncio
from typing import Protocol

from modelserver.client.control import error_of
from modelserver.errors import UnavailableError


class Answers(Protocol):
    """Receives every answer; a driver of the load."""

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        """The request of `lane` is over; `failure` says why it failed. The lane is free and may be sent another."""

    def responded(self, lane: Lane) -> None:
        """One of several responses has come; `lane.response_times` has it."""


class Lane(abc.ABC):
    """Times are of the monotonic clock, in ns, and those of the last request."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        # Handed to the server's kernel or, where several are sent at once, to the buffer of that write.
        self.start_ns = 0
        self.sent_ns = 0
        self.first_ns = 0
        # When the request was due; 0 in a closed loop, where it is due when it is sent.
        self.due_ns = 0
        # Of streamed responses: when each came.
        self.response_times: list[int] = []
        # The whole answer, where `keeps_answer`.
        self.answer = b""
        self.keeps_answer = False
        # Which request of the data is in flight, for checking its answer.
        self.step = 0
        # The position of this lane among those of its load; a sequence belongs to one lane.
        self.index = 0

    @abc.abstractmethod
    def send(self, request: bytes) -> None:
        """Send a complete request: HTTP head and body, or gRPC prefix and message. The lane must be free."""

    @abc.abstractmethod
    async def connect(self) -> None:
        """Make the lane ready. Raises UnavailableError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop the connection; a request in flight is forgotten, and its answer not reported."""


class Questions(Answers):
    """The owner of lanes whose requests are awaited one by one. A lane takes one question at a time."""

    def __init__(self) -> None:
        self._waiting: dict[Lane, asyncio.Future[str | None]] = {}

    async def ask(self, lane: Lane, request: bytes, timeout_s: float) -> bytes:
        """The answer. Raises a ServerError with the server's words; UnavailableError after `timeout_s`."""
        waiting = self._waiting[lane] = asyncio.get_running_loop().create_future()
        lane.keeps_answer = True
        lane.send(request)
        try:
            async with asyncio.timeout(timeout_s):
                failure = await waiting
        except TimeoutError:
            raise UnavailableError(f"the server does not answer within {timeout_s:g} s") from None
        if failure is not None:
            raise error_of(failure)
        return lane.answer

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        del now_ns
        waiting = self._waiting.get(lane)
        if waiting is not None and not waiting.done():
            waiting.set_result(failure)

    def responded(self, lane: Lane) -> None:
        """A question has one response."""

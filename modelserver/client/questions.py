"""Single questions on lanes, each with a time limit and an answer that is kept."""

from __future__ import annotations

import asyncio

from modelserver.client.control import error_of
from modelserver.client.lane import Answers, Lane
from modelserver.errors import UnavailableError


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

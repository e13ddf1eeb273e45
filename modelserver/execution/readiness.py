"""Asking a child process whether its instance is ready, without waiting long for the answer."""

from __future__ import annotations

import time

from modelserver.execution.child_process import ChildProcess
from modelserver.execution.messages import AskReady, Readiness

# How long the readiness endpoint may hold the event loop for an idle child's answer.
_READINESS_WAIT_S = 0.05
# An answer to the readiness question that takes longer means "no".
_READINESS_LIMIT_S = 5.0


class ReadinessProbe:
    """The last answer of a child to "are you ready?" and the question that is still open."""

    def __init__(self, *, is_asked: bool = False) -> None:
        self.is_asked = is_asked
        self._number = 0
        self._asked_at_s: float | None = None
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        if self._asked_at_s is not None and time.monotonic() - self._asked_at_s > _READINESS_LIMIT_S:
            return False
        return self._is_ready

    def ask(self, child: ChildProcess) -> None:
        """Put the question, unless it is open, and wait a moment for the answer. The caller holds the channel."""
        if self._asked_at_s is None:
            self._number += 1
            self._asked_at_s = time.monotonic()
            child.channel.send(AskReady(number=self._number))
        if child.channel.wait(_READINESS_WAIT_S):
            message, _ = child.channel.receive()
            assert isinstance(message, Readiness), f"expected Readiness, got {message!r}"
            self.record(message)

    def record(self, message: Readiness) -> None:
        if message.number == self._number:
            self._is_ready = message.is_ready
            self._asked_at_s = None

"""Asking a child process whether its instance is ready, without waiting long for the answer."""

from __future__ import annotations

import time
from typing import Protocol

from modelserver.execution.messages import Readiness

# How long the readiness endpoint may hold the event loop for an idle child's answer.
_READINESS_WAIT_S = 0.05
# An answer to the readiness question that takes longer means "no".
_READINESS_LIMIT_S = 5.0


class Asked(Protocol):
    """What a probe needs of the conversation with a child."""

    def ask_ready(self, number: int) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """Handle what the child says within that time; whether there was something."""


class ReadinessProbe:
    """The last answer of a child to "are you ready?" and the question that is still open."""

    def __init__(self, *, is_asked: bool = False) -> None:
        self.is_asked = is_asked
        self._number = 0
        self._asked_at_s: float | None = None
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        if self.waited_s > _READINESS_LIMIT_S:
            return False
        return self._is_ready

    @property
    def waited_s(self) -> float:
        """For how long the question has been open; 0 when it is answered."""
        return 0.0 if self._asked_at_s is None else time.monotonic() - self._asked_at_s

    def ask(self, conversation: Asked) -> None:
        """Put the question, unless it is open, and wait a moment for the answer. Called from the loop thread."""
        if self._asked_at_s is None:
            self._number += 1
            self._asked_at_s = time.monotonic()
            conversation.ask_ready(self._number)
        until_s = time.monotonic() + _READINESS_WAIT_S
        while self._asked_at_s is not None and (left_s := until_s - time.monotonic()) > 0:
            if not conversation.wait(left_s):
                return

    def record(self, message: Readiness) -> None:
        """The child's answer has come."""
        if message.number == self._number:
            self._is_ready = message.is_ready
            self._asked_at_s = None

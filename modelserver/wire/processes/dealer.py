"""Deals each accepted connection to the front with the fewest."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from modelserver.wire.processes.session import FrontSession

_logger = logging.getLogger(__name__)


class Dealer:
    """Holds the fronts that serve. Event loop thread only.

    `changed` is called when the first front was added or the last one removed.
    """

    def __init__(self, changed: Callable[[bool], None]) -> None:
        self._changed = changed
        self._sessions: list[FrontSession] = []

    @property
    def sessions(self) -> list[FrontSession]:
        """The fronts that serve now."""
        return self._sessions

    def add(self, session: FrontSession) -> None:
        """Deal to this front from now on."""
        self._sessions.append(session)
        if len(self._sessions) == 1:
            self._changed(True)

    def remove(self, session: FrontSession) -> None:
        """Stop dealing to this front; does nothing if it is not here."""
        if session in self._sessions:
            self._sessions.remove(session)
            if not self._sessions:
                self._changed(False)

    def deal(self, port_index: int, accepted: socket.socket) -> None:
        """Deal a connection. If no front takes it, which means that all hang, it is closed."""
        for session in sorted(self._sessions, key=_load):
            if session.deal(port_index, accepted):
                return
        _logger.error("closed a new connection: no front process takes it")
        accepted.close()


def _load(session: FrontSession) -> int:
    return session.num_connections

"""The newest lines of the log, kept for clients that read or follow the log over the network."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque

NUM_KEPT = 1000
# Limit of unread lines per follower; further lines are only counted.
_NUM_WAITING = 1000


class LogTail:
    """Fed by the log's thread; read on the event loop thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=NUM_KEPT)
        self._followers: set[LogFollower] = set()

    def add(self, line: str) -> None:
        """Keep a line, and pass it on. From any thread."""
        with self._lock:
            self._lines.append(line)
            followers = tuple(self._followers)
        for follower in followers:
            follower.add(line)

    def newest(self, num_lines: int) -> list[str]:
        """The last lines, oldest first."""
        with self._lock:
            lines = list(self._lines)
        return lines[len(lines) - min(num_lines, len(lines)) :]

    def follow(self, num_lines: int) -> LogFollower:
        """A follower that gets the last lines, and from then on each new one, until it is closed."""
        follower = LogFollower(self, asyncio.get_running_loop())
        with self._lock:
            lines = list(self._lines)
            self._followers.add(follower)
        for line in lines[len(lines) - min(num_lines, len(lines)) :]:
            follower.take(line)
        return follower

    def close(self) -> None:
        """End the followers, which would otherwise delay the server's stop."""
        with self._lock:
            followers = tuple(self._followers)
        for follower in followers:
            follower.end()

    def leave(self, follower: LogFollower) -> None:
        """Remove a follower."""
        with self._lock:
            self._followers.discard(follower)


class LogFollower:
    """One reader. A slow reader misses lines and gets their number instead; it never delays the log."""

    def __init__(self, tail: LogTail, loop: asyncio.AbstractEventLoop) -> None:
        self._tail = tail
        self._loop = loop
        self._lines: deque[str] = deque()
        self._num_missed = 0
        self._is_ended = False
        self._has_news = asyncio.Event()

    def add(self, line: str) -> None:
        """From the log's thread."""
        try:
            self._loop.call_soon_threadsafe(self.take, line)
        except RuntimeError:  # the loop has ended, and the reader with it
            self.close()

    def take(self, line: str) -> None:
        if len(self._lines) < _NUM_WAITING:
            self._lines.append(line)
        else:
            self._num_missed += 1
        self._has_news.set()

    async def lines(self) -> list[str]:
        """The lines since the last call; waits for at least one. Empty when the follower has ended."""
        await self._has_news.wait()
        if not self._is_ended:
            self._has_news.clear()
        lines = list(self._lines)
        self._lines.clear()
        if self._num_missed:
            lines.append(f"... {self._num_missed} lines were too fast for this reader")
            self._num_missed = 0
        return lines

    def end(self) -> None:
        """End the reader. Event loop thread."""
        self._is_ended = True
        self._has_news.set()

    def close(self) -> None:
        self._tail.leave(self)


class TailHandler(logging.Handler):
    """Puts each line of the log into a tail, formatted as in the log."""

    def __init__(self, tail: LogTail) -> None:
        super().__init__()
        self._tail = tail

    def emit(self, record: logging.LogRecord) -> None:
        self._tail.add(self.format(record))

"""A real redis-server on a port of its own, kept in memory only."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from support.tools import tool

PATIENCE_S = 20.0


class RedisServer:
    """One server, which a test may stop and start again on the same port."""

    def __init__(self, directory: Path, port: int) -> None:
        self.port = port
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        self._process = subprocess.Popen([tool("redis-server"), *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def num_keys(self) -> int:
        with redis.Redis(port=self.port) as client:
            return int(client.dbsize())  # type: ignore[arg-type]  # no coroutine: this client is synchronous

    def _answers(self) -> bool:
        try:
            with redis.Redis(port=self.port) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def redis_server(directory: Path, port: int) -> Iterator[RedisServer]:
    """A running server until the block ends."""
    server = RedisServer(directory, port)
    server.start()
    try:
        yield server
    finally:
        server.stop()

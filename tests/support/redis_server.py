"""A real redis-server on a port of its own, kept in memory only."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from support.certificates import Authority
from support.tools import tool

PATIENCE_S = 60.0


class RedisServer:
    """One server, which a test may stop and start again on the same port.

    With an `authority` it speaks TLS only, and asks clients for a certificate that this has signed.
    """

    def __init__(self, directory: Path, port: int, authority: Authority | None = None) -> None:
        self.port = port
        self._options = ["--port", str(port)]
        self._tls: dict[str, Any] = {}
        if authority is not None:
            pair = authority.pair("redis")
            files = {"cert-file": pair.certificate, "key-file": pair.key, "ca-cert-file": authority.certificate}
            self._options = ["--port", "0", "--tls-port", str(port)]
            self._options += [word for name, file in files.items() for word in (f"--tls-{name}", str(file))]
            self._tls = {"ssl": True, "ssl_certfile": str(pair.certificate), "ssl_keyfile": str(pair.key)}
            self._tls["ssl_ca_certs"] = str(authority.certificate)
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [*self._options, "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
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
        with redis.Redis("127.0.0.1", self.port, **self._tls) as client:
            return int(client.dbsize())  # type: ignore[arg-type]  # no coroutine: this client is synchronous

    def _answers(self) -> bool:
        try:
            with redis.Redis("127.0.0.1", self.port, **self._tls) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def redis_server(directory: Path, port: int, authority: Authority | None = None) -> Iterator[RedisServer]:
    """A running server until the block ends."""
    server = RedisServer(directory, port, authority)
    server.start()
    try:
        yield server
    finally:
        server.stop()

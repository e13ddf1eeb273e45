"""An HTTP/1.1 client on a bare socket: sends what it likes, and reads answers one by one."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from dataclasses import dataclass

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Http1Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Http1Peer:
    """A connection; a context manager."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        tls: ssl.SSLContext | None = None,
        receive_buffer_bytes: int | None = None,
    ) -> None:
        self._socket: socket.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.connect(address)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=address[0])
        self._received = b""

    def __enter__(self) -> Http1Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def vanish(self) -> None:
        """Leave by a TCP reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()

    @property
    def is_reset(self) -> bool:
        """Whether the server has cut the connection, unread as what it sent before may be. Once."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET

    def send(self, sent: bytes) -> None:
        """All of it; what a server that has closed does not take is lost."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(sent)

    def try_send(self, sent: bytes, timeout_s: float = 0.2) -> int:
        """As much as the server takes; how much that was."""
        self._socket.settimeout(timeout_s)
        num_sent = 0
        try:
            while num_sent < len(sent):
                num_sent += self._socket.send(sent[num_sent : num_sent + 65536])
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        self._socket.settimeout(PATIENCE_S)
        return num_sent

    def ask(self, target: str = "/", *, method: str = "GET", body: bytes | None = None) -> None:
        """A request that nobody could object to."""
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        self.send(f"{method} {target} HTTP/1.1\r\nHost: test\r\n{length}\r\n".encode() + (body or b""))

    def read_answer(self) -> Http1Answer:
        """The next final answer. Fails when the server closes before its end."""
        lines = self._read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        if status < 200:
            return self.read_answer()
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        if headers.get("transfer-encoding") == "chunked":
            return Http1Answer(status, headers, self._read_chunks())
        return Http1Answer(status, headers, self._read_exactly(int(headers.get("content-length", "0"))))

    def read_all(self) -> bytes:
        """What comes until the server closes."""
        while self._receive():
            pass
        found, self._received = self._received, b""
        return found

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self._read_until(b"\r\n"), 16):
            body += self._read_exactly(size)
            self._read_until(b"\r\n")
        self._read_until(b"\r\n")
        return body

    def _read_until(self, end: bytes) -> bytes:
        while end not in self._received:
            assert self._receive(), f"the connection ended with {self._received!r}, expected {end!r}"
        found, _, self._received = self._received.partition(end)
        return found

    def _read_exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            assert self._receive(), f"the connection ended after {len(self._received)} of {count} bytes"
        found, self._received = self._received[:count], self._received[count:]
        return found

    def _receive(self) -> bool:
        try:
            piece = self._socket.recv(1 << 18)
        except (ConnectionResetError, BrokenPipeError):
            piece = b""
        self._received += piece
        return bool(piece)

"""A small HTTP server that streams tokens as language models do, with delays that a test sets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class TokenServer:
    """What the server does; `port` is there once it runs. Requests that came are in `bodies`, with their paths."""

    first_s: float = 0.02
    gap_s: float = 0.005
    num_tokens: int = 5
    # Tokens in one event: `usage` counts them all.
    tokens_per_event: int = 1
    has_usage: bool = True
    status: int = 200
    # The number of events after which the connection breaks.
    breaks_after: int | None = None
    port: int = 0
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode()
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append((path, body))
                if not await self._respond(writer, path, body):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _respond(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        if self.status != 200:
            text = json.dumps({"error": {"message": "no such model"}})
            writer.write(f"HTTP/1.1 {self.status} Error\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return True
        usage = {"prompt_tokens": 7, "completion_tokens": self.num_tokens * self.tokens_per_event}
        if not body["stream"]:
            text = json.dumps({"choices": [{"text": "a whole answer"}], "usage": usage})
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return True
        writer.write(HEAD.encode())
        await asyncio.sleep(self.first_s)
        for number in range(self.num_tokens):
            if number == self.breaks_after:
                return False
            if number:
                await asyncio.sleep(self.gap_s)
            _event(writer, self._token(path, number))
            await writer.drain()
        if "/v1/" in path:
            if self.has_usage:
                _event(writer, {"choices": [], "usage": usage})
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _token(path: str, number: int) -> dict[str, Any]:
        if path.endswith("/chat/completions"):
            return {"choices": [{"delta": {"content": f" t{number}"}}]}
        if path.endswith("/completions"):
            return {"choices": [{"text": f" t{number}"}]}
        return {"model_name": "llm", "text_output": f" t{number}"}


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(document).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def token_server(**options: Any) -> Iterator[TokenServer]:
    """Serve in a thread until the block ends."""
    server = TokenServer(**options)
    ready = threading.Event()
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        stop = asyncio.Event()
        ends.append((asyncio.get_running_loop(), stop))
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listening.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="token-server")
    thread.start()
    assert ready.wait(10), "the token server did not start"
    try:
        yield server
    finally:
        loop, stop = ends[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive(), "the token server did not end"

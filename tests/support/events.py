"""Server-sent events: a client that reads no faster than it is told, and the events of a whole answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from support.serving import RunningServer

TIMEOUT_S = 20.0


class EventCall:
    """A POST and its answer: an event at a time, or all of it. A context manager, which leaves at its end."""

    def __init__(
        self, server: RunningServer, path: str, document: object, headers: dict[str, str] | None = None
    ) -> None:
        self._connection = http.client.HTTPConnection(server.http_url, timeout=TIMEOUT_S)
        self._connection.request("POST", path, json.dumps(document), headers or {})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.media_type = self._answer.headers.get("Content-Type", "")

    def __enter__(self) -> EventCall:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The events as they come; comments are left out."""
        for line in self._answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
            else:
                assert line == b"\n" or line.startswith(b":"), line

    def next(self) -> dict[str, Any]:
        return next(iter(self))

    def text(self) -> str:
        """The whole answer as it is, without comments."""
        return "".join(line.decode() for line in self._answer if not line.startswith(b":"))

    def document(self) -> Any:
        """The whole answer, of a call that is not answered by events."""
        return json.loads(self._answer.read())


def events(server: RunningServer, path: str, document: object, headers: dict[str, str] | None = None) -> list[Any]:
    """All events of a call."""
    with EventCall(server, path, document, headers) as call:
        assert call.media_type.startswith("text/event-stream"), call.document()
        return list(call)


def events_of(text: str) -> list[dict[str, Any]]:
    """The documents of a stream, without its end mark."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]

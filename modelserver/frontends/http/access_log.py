"""HTTP calls on their way to the access log."""

from __future__ import annotations

from contextlib import suppress

from modelserver.auth.access import Admitted
from modelserver.auth.api_keys import KeyRing
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead, ResponseWriter
from modelserver.protocol.response import ErrorWriter, HttpResponse
from modelserver.telemetry.access_log import ACCESS, AccessEntry, num_bytes


def with_access_log(frontend: HttpHandler, *, is_logged: bool, keys: KeyRing | None = None) -> HttpHandler:
    """The frontend, with a line for each of its exchanges if that is wanted.

    `keys` identify the caller of a call that another process answers, which checks the key itself.
    """
    return LoggedFrontend(frontend, keys) if is_logged else frontend


class LoggedFrontend(HttpHandler):
    """Stands before a frontend."""

    def __init__(self, frontend: HttpHandler, keys: KeyRing | None = None) -> None:
        self._frontend = frontend
        self._keys = keys

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        entry = AccessEntry(
            "HTTP",
            head.method,
            head.path,
            peer=exchange.peer,
            num_bytes_in=num_bytes(exchange.body),
            trace_parent=head.headers.get("traceparent", ""),
        )
        token = ACCESS.set(entry)
        try:
            if self._keys is not None:
                with suppress(ServerError):
                    self._keys.caller(head.headers)
            self._frontend.handle(_LoggedExchange(exchange, entry))
        finally:
            ACCESS.reset(token)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """A request that is refused by its head is logged, too."""
        entry = AccessEntry(
            "HTTP",
            head.method,
            head.path,
            peer=peer,
            num_bytes_in=0,
            trace_parent=head.headers.get("traceparent", ""),
        )
        token = ACCESS.set(entry)
        try:
            checked = self._frontend.check_head(head, peer)
        finally:
            ACCESS.reset(token)
        if isinstance(checked, HttpResponse):
            entry.write(str(checked.status), sum(map(num_bytes, checked.body)))
        return checked

    def errors(self, path: str) -> ErrorWriter:
        return self._frontend.errors(path)


class _LoggedExchange(HttpExchange):
    """An exchange whose answer is recorded."""

    __slots__ = ("_entry", "_exchange")

    def __init__(self, exchange: HttpExchange, entry: AccessEntry) -> None:
        self._exchange = exchange
        self._entry = entry
        self.head = exchange.head
        self.body = exchange.body
        self.on_disconnect = None
        exchange.on_disconnect = self._leave

    @property
    def peer(self) -> str:
        return self._exchange.peer

    def respond(self, response: HttpResponse) -> None:
        self._exchange.respond(response)
        self._entry.write(str(response.status), sum(map(num_bytes, response.body)))

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        return _LoggedWriter(self._exchange.start(status, headers), self._entry, status)

    def _leave(self) -> None:
        self._entry.write("left", 0)
        if self.on_disconnect is not None:
            self.on_disconnect()


class _LoggedWriter:
    """Counts the bytes written, until the end or until the client has left."""

    def __init__(self, writer: ResponseWriter, entry: AccessEntry, status: int) -> None:
        self._writer = writer
        self._entry = entry
        self._status = status
        self._num_bytes = 0

    def send(self, data: Buffer) -> bool:
        try:
            has_room = self._writer.send(data)
        except ConnectionError:
            self._entry.write("left", self._num_bytes)
            raise
        self._num_bytes += num_bytes(data)
        return has_room

    async def wait_for_room(self) -> None:
        try:
            await self._writer.wait_for_room()
        except ConnectionError:
            self._entry.write("left", self._num_bytes)
            raise

    async def write(self, data: Buffer) -> None:
        if not self.send(data):
            await self.wait_for_room()

    async def close(self) -> None:
        await self._writer.close()
        self._entry.write(str(self._status), self._num_bytes)

    def abort(self) -> None:
        self._writer.abort()
        self._entry.write("broken", self._num_bytes)

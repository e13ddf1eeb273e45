"""Small handlers of both protocols for tests of the wire: echo, answers of any size, calls that a test holds back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial

from modelserver.protocol.call import Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler, ResponseWriter
from modelserver.protocol.response import HttpResponse

SERVICE = "/test.Wire/"


class GrpcExamples:
    """Methods of the service `test.Wire`. Loop thread, except that lengths of the lists may be read elsewhere."""

    def __init__(self) -> None:
        self.held: list[UnaryCall] = []
        # Calls that came to be held, and those of them that were cancelled.
        self.num_begun = self.num_cancelled = 0
        # Streaming calls that run, and how those that ended did: "done", "failed" or "cancelled".
        self.num_streams = 0
        self.ended_streams: list[str] = []
        # Messages that `Count` has sent.
        self.num_sent = 0
        self.is_draining = False
        unary = {
            "Echo": _echo,
            "Size": _size,
            "Ignore": _ignore,
            "Fail": _fail,
            "Metadata": _metadata,
            "Hold": self._hold,
            "Stubborn": self.held.append,
        }
        streams = {"Chat": _chat, "Count": self._count, "Sum": _sum, "FailLate": _fail_late, "Deaf": _deaf}
        self.methods: Mapping[str, Method] = {
            **{SERVICE + name: Method(unary=handle) for name, handle in unary.items()},
            **{SERVICE + name: Method(stream=partial(self._run, handle)) for name, handle in streams.items()},
        }

    def drain(self) -> None:
        self.is_draining = True

    def release(self) -> None:
        """Echo all that is held."""
        while self.held:
            call = self.held.pop()
            call.reply((call.message,))

    def _hold(self, call: UnaryCall) -> None:
        """Held until `release`; a cancelled one is forgotten."""
        self.num_begun += 1
        self.held.append(call)
        call.on_cancel = lambda: self._cancel(call)

    def _cancel(self, call: UnaryCall) -> None:
        if call in self.held:
            self.held.remove(call)
        call.on_cancel = None
        self.num_cancelled += 1

    async def _count(self, call: StreamCall) -> None:
        """The first message is `<number> <size>`: that many messages of that size, each beginning with its number."""
        first = await anext(aiter(call.messages))
        number, size = map(int, bytes(first).split())
        for index in range(number):
            await call.send((index.to_bytes(4, "big"), bytes(size - 4)))
            self.num_sent += 1

    async def _run(self, handle: Callable[[StreamCall], object], call: StreamCall) -> None:
        self.num_streams += 1
        how = "cancelled"
        try:
            await handle(call)  # type: ignore[misc]
            how = "done"
        except RpcError:
            how = "failed"
            raise
        finally:
            self.num_streams -= 1
            self.ended_streams.append(how)


def _echo(call: UnaryCall) -> None:
    call.reply((call.message,))


def _size(call: UnaryCall) -> None:
    """As many zero bytes as the message says in decimal."""
    call.reply((bytes(int(bytes(call.message))),))


def _ignore(call: UnaryCall) -> None:
    """How long the message was."""
    call.reply((str(len(call.message)).encode(),))


def _fail(call: UnaryCall) -> None:
    """The message is `<status> <text>`."""
    status, _, text = bytes(call.message).decode().partition(" ")
    call.fail(int(status), text)


def _metadata(call: UnaryCall) -> None:
    """The metadata as JSON; binary values as lists of numbers. With the deadline, which has passed or not."""
    found = {key: value if isinstance(value, str) else list(value) for key, value in call.metadata.items()}
    found["has-deadline"] = str(call.deadline_ns is not None)
    call.reply((json.dumps(found).encode(),))


async def _chat(call: StreamCall) -> None:
    """Every message back, one by one."""
    async for message in call.messages:
        await call.send((message,))


async def _sum(call: StreamCall) -> None:
    """One answer after the client's end: `<number of messages> <bytes>`."""
    lengths = [len(message) async for message in call.messages]
    await call.send((f"{len(lengths)} {sum(lengths)}".encode(),))


async def _fail_late(call: StreamCall) -> None:
    """One message, then a failure with a text that needs encoding."""
    async for message in call.messages:
        await call.send((message,))
        raise RpcError(9, "too late: 100 % \n é 漢")


async def _deaf(call: StreamCall) -> None:
    """Reads nothing until it is cancelled."""
    await asyncio.get_running_loop().create_future()


class HttpExamples(HttpHandler):
    """`/` and `/v2/health/ready`, `/echo`, `/head`, `/size/<n>`, `/pieces/<n>/<size>`, `/hold`; 404 for all else."""

    def __init__(self) -> None:
        self.held: list[HttpExchange] = []
        self.num_disconnected = 0
        self.num_requests = 0
        # Handlers that write piece by piece, and the pieces that were taken.
        self.num_writers = 0
        self.num_pieces = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self) -> None:
        while self.held:
            self.held.pop().respond(_plain(b"released"))

    def handle(self, exchange: HttpExchange) -> None:
        self.num_requests += 1
        match exchange.head.path.strip("/").split("/"):
            case [""] | ["v2", "health", "ready"]:
                exchange.respond(_plain(b"hello"))
            case ["echo"]:
                exchange.respond(HttpResponse(200, [("content-type", "application/octet-stream")], (exchange.body,)))
            case ["head"]:
                exchange.respond(_plain(json.dumps(_head_of(exchange)).encode()))
            case ["size", size]:
                exchange.respond(_plain(bytes(int(size))))
            case ["hold"]:
                self.held.append(exchange)
                exchange.on_disconnect = partial(self._leave, exchange)
            case ["pieces", number, size]:
                self._write(exchange.start(200, [("content-type", "text/event-stream")]), int(number), int(size))
            case _:
                exchange.respond(HttpResponse(404, [("content-type", "text/plain")], (b"not found",)))

    def _leave(self, exchange: HttpExchange) -> None:
        if exchange in self.held:
            self.held.remove(exchange)
        self.num_disconnected += 1

    def _write(self, writer: ResponseWriter, number: int, size: int) -> None:
        async def write() -> None:
            self.num_writers += 1
            try:
                for _ in range(number):
                    await writer.write(bytes(size))
                    self.num_pieces += 1
                await writer.close()
            except ConnectionError:
                pass
            finally:
                self.num_writers -= 1

        task = asyncio.ensure_future(write())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _plain(body: bytes) -> HttpResponse:
    return HttpResponse(200, [("content-type", "text/plain")], (body,))


def _head_of(exchange: HttpExchange) -> dict[str, object]:
    head = exchange.head
    return {"method": head.method, "path": head.path, "query": head.query, "headers": dict(head.headers)}

"""Who answers a batch: a running server over HTTP, or a server in this process without a socket."""

from __future__ import annotations

import abc
import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from modelserver.batch.columns import ModelShape
from modelserver.client.endpoint import Endpoint
from modelserver.client.heads import HttpRequestHead, model_path
from modelserver.client.http_lane import HttpLane
from modelserver.client.infer_answer import http_outputs
from modelserver.client.lane import Answers, Lane
from modelserver.client.server_client import ServerClient
from modelserver.core.tensor import Tensor, tensor_to_bytes
from modelserver.errors import ServerError, UnsupportedError
from modelserver.wire.context import Arena

if TYPE_CHECKING:
    from modelserver.app.server import Server

# A status of a server that does not answer.
UNREACHABLE = 0
_STATUS = re.compile(r"HTTP (\d{3}): (.*)", re.DOTALL)


class RefusedError(Exception):
    """A request that was not answered as it should; `status` is one of HTTP's, or `UNREACHABLE`."""

    def __init__(self, status: int, message: str, body: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.message, self.body = status, message, body


class Session(abc.ABC):
    """Sends one request at a time."""

    @abc.abstractmethod
    async def infer(self, model: ModelShape, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of a request. Raises RefusedError."""

    @abc.abstractmethod
    async def call(self, path: str, body: bytes) -> bytes:
        """The answer to a document that is posted. Raises RefusedError, whose body is the document of the error."""

    def close(self) -> None:
        """Drop what is in flight."""


class Target(abc.ABC):
    """Made in an event loop, used in it."""

    @abc.abstractmethod
    async def start(self) -> None: ...

    @abc.abstractmethod
    async def model(self, name: str, version: str) -> ModelShape:
        """Raises ServerError."""

    @abc.abstractmethod
    def session(self) -> Session: ...

    async def stop(self) -> None:
        """End what `start` began."""


class ServerTarget(Target):
    """A server at an address."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._heads: dict[str, HttpRequestHead] = {}
        self._arena = Arena()

    async def start(self) -> None:
        """Sessions connect when they are used."""

    async def model(self, name: str, version: str) -> ModelShape:
        def ask() -> ModelShape:
            client = self._endpoint.control()
            assert isinstance(client, ServerClient)
            versions = client.model_metadata(name, version)["versions"]
            return ModelShape.of(version or max(versions, key=int), client.model_config(name, version))

        return await asyncio.to_thread(ask)

    def session(self) -> Session:
        return _HttpSession(self)

    def head(self, path: str) -> HttpRequestHead:
        head = self._heads.get(path)
        if head is None:
            head = HttpRequestHead(self._endpoint.address, "POST", path, self._endpoint.headers)
            self._heads[path] = head
        return head

    def lane(self, answers: Answers) -> HttpLane:
        return HttpLane(self._endpoint.address, answers, self._arena)

    @property
    def timeout_s(self) -> float:
        return self._timeout_s


class _HttpSession(Session, Answers):
    """A connection, which is opened again when it is lost."""

    def __init__(self, target: ServerTarget) -> None:
        self._target = target
        self._lane: HttpLane | None = None
        self._answer: asyncio.Future[str | None] | None = None

    async def infer(self, model: ModelShape, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        raws = [tensor_to_bytes(tensor) for tensor in tensors]
        inputs = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(raw)},
            }
            for tensor, raw in zip(tensors, raws, strict=True)
        ]
        document = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
        body = b"".join([document, *raws])
        head = self._target.head(model_path(model.name, model.version) + "/infer")
        answer = await self._ask(head.encode(len(body), len(document)) + body)
        assert self._lane is not None, "it has answered"
        try:
            return [output.tensor() for output in http_outputs(answer, self._lane.json_len)[1]]
        except (ValueError, KeyError, TypeError, ServerError) as error:
            raise RefusedError(502, f"the answer cannot be read: {error}") from None

    async def call(self, path: str, body: bytes) -> bytes:
        return await self._ask(self._target.head(path).encode(len(body)) + body)

    async def _ask(self, request: bytes) -> bytes:
        if self._lane is None:
            self._lane = self._target.lane(self)
            self._lane.keeps_answer = True
        lane = self._lane
        answer = self._answer = asyncio.get_running_loop().create_future()
        lane.send(request)
        try:
            async with asyncio.timeout(self._target.timeout_s):
                failure = await answer
        except TimeoutError:
            self.close()
            raise RefusedError(504, f"no answer within {self._target.timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.close()
            raise
        if failure is None:
            return lane.answer
        match = _STATUS.fullmatch(failure)
        if match is None:
            raise RefusedError(UNREACHABLE, failure)
        raise RefusedError(int(match[1]), match[2], lane.answer)

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        del lane, now_ns
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(failure)

    def responded(self, lane: Lane) -> None:
        """Requests have one response."""

    def close(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()


class ProcessTarget(Target):
    """Model repositories, served in this process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are those of `modelserver serve`, by their names."""
        self._options = dict(options)
        self._server: Server | None = None

    async def start(self) -> None:
        """Raises ServerError if the server cannot be started."""
        # Here, because a batch over HTTP needs none of it.
        from modelserver.app.server import Server
        from modelserver.options.server_options import ServerOptions

        closed = {"allow_http": False, "allow_grpc": False, "allow_metrics": False}
        server = Server(ServerOptions(**(self._options | closed)))
        await server.start()
        self._server = server

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    @property
    def server(self) -> Server:
        assert self._server is not None, "start comes first"
        return self._server

    async def model(self, name: str, version: str) -> ModelShape:
        from modelserver.config.message import config_to_json

        plane, number = self.server.dataplane, int(version) if version else None
        config = config_to_json(plane.model_config(name, number))
        return ModelShape.of(version or max(plane.model_metadata(name, number).versions, key=int), config)

    def session(self) -> Session:
        return _ProcessSession(self.server)


class _ProcessSession(Session):
    def __init__(self, server: Server) -> None:
        from modelserver.frontends.openai.batches.service import endpoint_handlers
        from modelserver.protocol.limits import HttpLimits

        self._plane = server.dataplane
        self._handlers = endpoint_handlers(server.dataplane, HttpLimits())

    async def infer(self, model: ModelShape, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        from modelserver.core.request import InFlightRequest
        from modelserver.core.response import ResponseStream
        from modelserver.planes.authorized import ask
        from modelserver.protocol.response import STATUS

        def make() -> InFlightRequest:
            return InFlightRequest(
                model_name=model.name,
                version=int(model.version),
                inputs={tensor.name: tensor for tensor in tensors},
                stream=ResponseStream(),
            )

        found: Sequence[Tensor] | None = None
        try:
            async for outputs in ask(self._plane, make):
                if found is not None:
                    raise UnsupportedError(f"model '{model.name}' answers more than once, and a row has one answer")
                found = outputs
        except ServerError as error:
            raise RefusedError(STATUS[error.code], error.message) from None
        if found is None:
            raise RefusedError(500, f"model '{model.name}' ended without an answer")
        return found

    async def call(self, path: str, body: bytes) -> bytes:
        from modelserver.frontends.openai.batches.runner import LineExchange

        handler = self._handlers.get(path)
        if handler is None:
            raise RefusedError(404, f"'{path}' is not an endpoint of batches: {', '.join(self._handlers)}")
        exchange = LineExchange(path, body)
        handler(exchange)
        try:
            status, document = await exchange.answer
        finally:
            exchange.leave()
        if status != 200:
            raise RefusedError(status, f"HTTP {status}", document)
        return document

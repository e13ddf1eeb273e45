"""What the bench asks a server besides inference: metadata, config, statistics, shared memory. Over either protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from modelserver.client.address import Address
from modelserver.client.grpc_lane import GrpcLane
from modelserver.client.grpc_messages import frame, unframe
from modelserver.client.h2_connection import H2Connection
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Lane
from modelserver.client.request_heads import GrpcHead, HttpHead, model_path
from modelserver.errors import ErrorCode, InvalidArgumentError, NotFoundError, ServerError, UnavailableError
from modelserver.pb import grpc_service_pb2 as pb

TIMEOUT_S = 30.0
# A load may compile, or read tens of gigabytes.
LOAD_TIMEOUT_S = 300.0

Document = dict[str, Any]


class Control(Protocol):
    """Documents have the names of Triton's JSON over both protocols. Raises ServerError with the server's words."""

    async def index(self) -> list[Document]: ...

    async def metadata(self, model: str, version: str) -> Document: ...

    async def config(self, model: str, version: str) -> Document: ...

    async def statistics(self, model: str, version: str) -> list[Document]: ...

    async def register(self, region: str, kind: str, details: Document) -> None:
        """Announce a region of shared memory; `kind` is system or cuda."""

    async def unregister(self, region: str, kind: str) -> None: ...

    async def load(self, model: str, config: Document | None = None) -> None:
        """Load a model, with `config` in place of its own; it may take long."""

    async def unload(self, model: str) -> None: ...

    def close(self) -> None: ...


class _Call:
    """One question at a time on a lane."""

    def __init__(self) -> None:
        self._done: asyncio.Future[str | None] | None = None

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        del lane, now_ns
        if self._done is not None and not self._done.done():
            self._done.set_result(failure)

    def responded(self, lane: Lane) -> None:
        """Questions have one response."""

    async def ask(self, lane: Lane, request: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """The answer. Raises the error that it says."""
        self._done = asyncio.get_running_loop().create_future()
        lane.keeps_answer = True
        lane.send(request)
        try:
            async with asyncio.timeout(timeout_s):
                failure = await self._done
        except TimeoutError:
            raise UnavailableError(f"the server does not answer within {timeout_s:g} s") from None
        if failure is not None:
            raise _error_of(failure)
        return lane.answer


_KINDS: dict[str, type[ServerError]] = {
    "HTTP 400": InvalidArgumentError,
    "HTTP 404": NotFoundError,
    "HTTP 503": UnavailableError,
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "UNAVAILABLE": UnavailableError,
}


def _error_of(failure: str) -> ServerError:
    status, colon, message = failure.partition(": ")
    kind = _KINDS.get(status)
    if kind is not None:
        return kind(message)
    return ServerError(message if colon else failure, code=ErrorCode.INTERNAL)


class HttpControl:
    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = headers
        self._call = _Call()
        self._lane = HttpLane(address, self._call)
        self._is_connected = False

    async def index(self) -> list[Document]:
        return list(await self._ask("POST", "/v2/repository/index", {}))

    async def metadata(self, model: str, version: str) -> Document:
        return dict(await self._ask("GET", model_path(model, version)))

    async def config(self, model: str, version: str) -> Document:
        return dict(await self._ask("GET", model_path(model, version) + "/config"))

    async def statistics(self, model: str, version: str) -> list[Document]:
        return list((await self._ask("GET", model_path(model, version) + "/stats")).get("model_stats", []))

    async def register(self, region: str, kind: str, details: Document) -> None:
        await self._ask("POST", f"/v2/{kind}sharedmemory/region/{quote(region, safe='')}/register", details)

    async def unregister(self, region: str, kind: str) -> None:
        await self._ask("POST", f"/v2/{kind}sharedmemory/region/{quote(region, safe='')}/unregister", {})

    async def load(self, model: str, config: Document | None = None) -> None:
        document = {} if config is None else {"parameters": {"config": json.dumps(config)}}
        await self._ask("POST", f"{_repository_path(model)}/load", document, LOAD_TIMEOUT_S)

    async def unload(self, model: str) -> None:
        await self._ask("POST", f"{_repository_path(model)}/unload", {}, LOAD_TIMEOUT_S)

    def close(self) -> None:
        self._lane.close()

    async def _ask(self, method: str, path: str, document: Document | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        if not self._is_connected:
            await self._lane.connect()
            self._is_connected = True
        body = b"" if document is None else json.dumps(document).encode()
        head = HttpHead(self._address, method, path, self._headers)
        answer = await self._call.ask(self._lane, head.encode(len(body)) + body, timeout_s)
        try:
            return json.loads(answer) if answer else {}
        except ValueError:
            raise ServerError(f"{self._address}{path} does not answer in JSON", code=ErrorCode.INTERNAL) from None


def _repository_path(model: str) -> str:
    return f"/v2/repository/models/{quote(model, safe='')}"


class GrpcControl:
    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = headers
        self._call = _Call()
        # A connection has one path; there are few.
        self._lanes: dict[str, tuple[H2Connection, GrpcLane]] = {}

    async def index(self) -> list[Document]:
        answer = await self._ask("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return list(answer.get("models", []))

    async def metadata(self, model: str, version: str) -> Document:
        request = pb.ModelMetadataRequest(name=model, version=version)
        return await self._ask("ModelMetadata", request, pb.ModelMetadataResponse)

    async def config(self, model: str, version: str) -> Document:
        request = pb.ModelConfigRequest(name=model, version=version)
        return dict((await self._ask("ModelConfig", request, pb.ModelConfigResponse)).get("config", {}))

    async def statistics(self, model: str, version: str) -> list[Document]:
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return list((await self._ask("ModelStatistics", request, pb.ModelStatisticsResponse)).get("model_stats", []))

    async def register(self, region: str, kind: str, details: Document) -> None:
        if kind == "system":
            system = pb.SystemSharedMemoryRegisterRequest(name=region, **details)
            await self._ask("SystemSharedMemoryRegister", system, pb.SystemSharedMemoryRegisterResponse)
            return
        cuda = pb.CudaSharedMemoryRegisterRequest(
            name=region,
            raw_handle=details["raw_handle"]["b64"].encode(),
            device_id=details["device_id"],
            byte_size=details["byte_size"],
        )
        await self._ask("CudaSharedMemoryRegister", cuda, pb.CudaSharedMemoryRegisterResponse)

    async def unregister(self, region: str, kind: str) -> None:
        if kind == "system":
            system = pb.SystemSharedMemoryUnregisterRequest(name=region)
            await self._ask("SystemSharedMemoryUnregister", system, pb.SystemSharedMemoryUnregisterResponse)
            return
        cuda = pb.CudaSharedMemoryUnregisterRequest(name=region)
        await self._ask("CudaSharedMemoryUnregister", cuda, pb.CudaSharedMemoryUnregisterResponse)

    async def load(self, model: str, config: Document | None = None) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = json.dumps(config)
        await self._ask("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse, LOAD_TIMEOUT_S)

    async def unload(self, model: str) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        await self._ask("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse, LOAD_TIMEOUT_S)

    def close(self) -> None:
        for connection, _ in self._lanes.values():
            connection.close()

    async def _ask(
        self, method: str, request: Message, response: type[Message], timeout_s: float = TIMEOUT_S
    ) -> Document:
        if method not in self._lanes:
            connection = H2Connection(self._address, GrpcHead(self._address, method, self._headers).fields)
            await connection.connect()
            self._lanes[method] = connection, GrpcLane(connection, self._call)
        framed = await self._call.ask(self._lanes[method][1], frame(request.SerializeToString()), timeout_s)
        message = response.FromString(unframe(framed, "none"))
        document: Document = MessageToDict(message, preserving_proto_field_name=True)
        return document

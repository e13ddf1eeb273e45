"""Control of a server over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from modelserver.client.address import Address
from modelserver.client.control import LOAD_TIMEOUT_S, TIMEOUT_S, ControlClient, Document
from modelserver.client.grpc_lane import GrpcLane
from modelserver.client.grpc_messages import frame, unframe
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.heads import GrpcRequestHead
from modelserver.client.lane import Questions
from modelserver.pb import grpc_service_pb2 as pb


class GrpcClient(ControlClient):
    """Talks to the gRPC port at `address`; a connection per call. Not for threads that run an event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = headers

    def index(self) -> list[Document]:
        answer = self._ask("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return list(answer.get("models", []))

    def model_metadata(self, model: str, version: str = "") -> Document:
        request = pb.ModelMetadataRequest(name=model, version=version)
        return self._ask_of_model(model, "ModelMetadata", request, pb.ModelMetadataResponse)

    def model_config(self, model: str, version: str = "") -> Document:
        request = pb.ModelConfigRequest(name=model, version=version)
        return dict(self._ask_of_model(model, "ModelConfig", request, pb.ModelConfigResponse).get("config", {}))

    def statistics(self, model: str, version: str = "") -> list[Document]:
        request = pb.ModelStatisticsRequest(name=model, version=version)
        answer = self._ask_of_model(model, "ModelStatistics", request, pb.ModelStatisticsResponse)
        return list(answer.get("model_stats", []))

    def register_region(self, region: str, kind: str, details: Document) -> None:
        if kind == "system":
            system = pb.SystemSharedMemoryRegisterRequest(name=region, **details)
            self._ask("SystemSharedMemoryRegister", system, pb.SystemSharedMemoryRegisterResponse)
            return
        cuda = pb.CudaSharedMemoryRegisterRequest(
            name=region,
            raw_handle=details["raw_handle"]["b64"].encode(),
            device_id=details["device_id"],
            byte_size=details["byte_size"],
        )
        self._ask("CudaSharedMemoryRegister", cuda, pb.CudaSharedMemoryRegisterResponse)

    def unregister_region(self, region: str, kind: str) -> None:
        if kind == "system":
            system = pb.SystemSharedMemoryUnregisterRequest(name=region)
            self._ask("SystemSharedMemoryUnregister", system, pb.SystemSharedMemoryUnregisterResponse)
            return
        cuda = pb.CudaSharedMemoryUnregisterRequest(name=region)
        self._ask("CudaSharedMemoryUnregister", cuda, pb.CudaSharedMemoryUnregisterResponse)

    def load(self, model: str, parameters: Mapping[str, str | bool] | None = None) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        _set(request.parameters, parameters)
        self._ask("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse, LOAD_TIMEOUT_S)

    def unload(self, model: str, parameters: Mapping[str, str | bool] | None = None) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        _set(request.parameters, parameters)
        self._ask("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse, LOAD_TIMEOUT_S)

    def _ask_of_model(self, model: str, method: str, request: Message, response: type[Message]) -> Document:
        with self.hinted(model):
            return self._ask(method, request, response)

    def _ask(self, method: str, request: Message, response: type[Message], timeout_s: float = TIMEOUT_S) -> Document:
        framed = asyncio.run(self._ask_once(method, frame(request.SerializeToString()), timeout_s))
        message = response.FromString(unframe(framed, "none"))
        document: Document = MessageToDict(message, preserving_proto_field_name=True)
        return document

    async def _ask_once(self, method: str, request: bytes, timeout_s: float) -> bytes:
        pool = GrpcPool(self._address, fields=GrpcRequestHead(self._address, method, self._headers).fields)
        questions = Questions()
        try:
            await pool.prepare()
            return await questions.ask(GrpcLane(pool, questions), request, timeout_s)
        finally:
            pool.abandon()


def _set(parameters: Any, values: Mapping[str, str | bool] | None) -> None:
    """Write parameters into a protobuf map."""
    for name, value in (values or {}).items():
        if isinstance(value, bool):
            parameters[name].bool_param = value
        else:
            parameters[name].string_param = value

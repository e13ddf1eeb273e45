from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from support.grpc_calls import OpenStream

from modelserver.protocol.call import Method
from modelserver.protocol.grpc_status import Status

Methods = Mapping[str, Method]
Reply = reflection_pb2.ServerReflectionResponse


@pytest.fixture(params=["v1", "v1alpha"])
def path(request: pytest.FixtureRequest) -> str:
    return f"/grpc.reflection.{request.param}.ServerReflection/ServerReflectionInfo"


async def ask(methods: Methods, path: str, **question: Any) -> Reply:
    stream = OpenStream(methods[path])
    stream.send(reflection_pb2.ServerReflectionRequest(host="h", **question))
    stream.half_close()
    reply = await stream.receive(Reply)
    assert await stream.status() == (Status.OK, "")
    assert reply.valid_host == "h"
    return reply


async def test_every_service_is_listed(methods: Methods, path: str) -> None:
    listed = (await ask(methods, path, list_services="")).list_services_response.service
    assert sorted(service.name for service in listed) == sorted({name.split("/")[1] for name in methods})


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "grpc_service.proto"},
        {"file_containing_symbol": "inference.GRPCInferenceService"},
        {"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"},
        {"file_containing_symbol": "inference.ModelInferRequest"},
    ],
)
async def test_files_come_with_their_imports(methods: Methods, path: str, question: dict[str, str]) -> None:
    files = (await ask(methods, path, **question)).file_descriptor_response.file_descriptor_proto
    assert [FileDescriptorProto.FromString(file).name for file in files] == ["grpc_service.proto", "model_config.proto"]
    pool = DescriptorPool()
    for file in reversed(files):
        pool.AddSerializedFile(file)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert {method.name for method in service.methods} >= {"ModelInfer", "ModelStreamInfer"}


@pytest.mark.parametrize("symbol", ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"])
async def test_other_services_are_described_too(methods: Methods, path: str, symbol: str) -> None:
    reply = await ask(methods, path, file_containing_symbol=symbol)
    assert len(reply.file_descriptor_response.file_descriptor_proto) == 1


@pytest.mark.parametrize("question", [{"file_by_filename": "no.proto"}, {"file_containing_symbol": "no.Such"}])
async def test_unknown_names(methods: Methods, path: str, question: dict[str, str]) -> None:
    error = (await ask(methods, path, **question)).error_response
    assert error.error_code == Status.NOT_FOUND
    assert next(iter(question.values())) in error.error_message


async def test_extensions_are_not_supported(methods: Methods, path: str) -> None:
    error = (await ask(methods, path, all_extension_numbers_of_type="inference.ModelConfig")).error_response
    assert error.error_code == Status.UNIMPLEMENTED


async def test_garbage(methods: Methods, path: str) -> None:
    stream = OpenStream(methods[path])
    stream.send(b"\xff")
    assert (await stream.status())[0] is Status.INVALID_ARGUMENT

"""Our protos against the descriptors of Triton's own client, and the generated code against the protos."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2 as their_config
from tritonclient.grpc import service_pb2 as their_service

from modelserver.pb import grpc_service_pb2, model_config_pb2
from modelserver.pb.pool import POOL

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "model_config": (model_config_pb2, their_config),
    "grpc_service": (grpc_service_pb2, their_service),
}
# KServe's, and our own, which Triton's client does not know.
OUR_ADDITIONS = {
    "RepositoryIndexResponse.ModelIndex.repository": (100, "optional", "string", None),
    "ModelMetadataResponse.properties": (6, "repeated", ".inference.ModelMetadataResponse.PropertiesEntry", None),
    "ModelMetadataResponse.PropertiesEntry": {},
    "ModelMetadataResponse.PropertiesEntry.key": (1, "optional", "string", None),
    "ModelMetadataResponse.PropertiesEntry.value": (2, "optional", "string", None),
}
# Messages and methods of our own begin so.
OUR_MESSAGES = ("ModelTraffic", "RepositoryModelTraffic", "GRPCInferenceService/RepositoryModelTraffic")


def describe(module) -> dict[str, object]:
    """Every message, field, enum value and method of a file, by its full name."""
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    facts: dict[str, object] = {"package": file.package, "syntax": file.syntax, "imports": list(file.dependency)}
    for enum in file.enum_type:
        facts[enum.name] = {value.name: value.number for value in enum.value}
    for message in file.message_type:
        describe_message(message, "", facts)
    for service in file.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            facts[f"{service.name}/{method.name}"] = (method.input_type, method.output_type, streams)
    return facts


def describe_message(message, prefix: str, facts: dict[str, object]) -> None:
    name = prefix + message.name
    facts[name] = {enum.name: {value.name: value.number for value in enum.value} for enum in message.enum_type}
    field_proto = descriptor_pb2.FieldDescriptorProto
    for field in message.field:
        label = field_proto.Label.Name(field.label).removeprefix("LABEL_").lower()
        kind = field.type_name or field_proto.Type.Name(field.type).removeprefix("TYPE_").lower()
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        facts[f"{name}.{field.name}"] = (field.number, label, kind, oneof)
    for nested in message.nested_type:
        describe_message(nested, f"{name}.", facts)


@pytest.mark.parametrize("name", FILES)
def test_every_field_has_tritons_number_and_type(name: str) -> None:
    ours, theirs = (describe(module) for module in FILES[name])
    additions = {key: value for key, value in OUR_ADDITIONS.items() if name == "grpc_service"}
    own = {key for key in ours.keys() - theirs.keys() if key.startswith(OUR_MESSAGES) and name == "grpc_service"}
    assert {key: fact for key, fact in ours.items() if key not in own} == theirs | additions


def test_generated_code_is_current() -> None:
    command = [sys.executable, "protos/generate.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


ORDERS = [
    ("modelserver.pb.grpc_service_pb2", "tritonclient.grpc"),
    ("tritonclient.grpc", "modelserver.pb.grpc_service_pb2"),
]


@pytest.mark.parametrize("order", ORDERS, ids=["ours first", "theirs first"])
def test_imports_beside_tritonclient_in_either_order(order: tuple[str, str]) -> None:
    program = (
        f"import {order[0]}, {order[1]}\n"
        "from modelserver.pb import grpc_service_pb2 as ours\n"
        "from tritonclient.grpc import service_pb2 as theirs\n"
        "request = theirs.ModelInferRequest(model_name='m', raw_input_contents=[b'x'])\n"
        "request.parameters['p'].int64_param = 3\n"
        "copy = ours.ModelInferRequest.FromString(request.SerializeToString())\n"
        "assert copy.parameters['p'].int64_param == 3 and copy.raw_input_contents == [b'x']\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_messages_live_in_the_private_pool() -> None:
    descriptor = POOL.FindMessageTypeByName("inference.ModelInferRequest")
    assert grpc_service_pb2.ModelInferRequest.DESCRIPTOR is descriptor
    assert their_service.ModelInferRequest.DESCRIPTOR is not descriptor

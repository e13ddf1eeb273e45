"""Server reflection: lets grpcurl and its like list and call our services without proto files."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2

from modelserver.auth.access import ApiGroup
from modelserver.core.tensor import Buffer
from modelserver.frontends.grpc.edge import parse, streamed
from modelserver.protocol.call import Service, StreamCall
from modelserver.protocol.grpc_status import Status

# Both versions of the protocol have the same messages.
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Reflection:
    """Describes services, and itself, by the files that declare them."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = sorted((*SERVICES, *(service.name for service in services)))
        # A separate pool, because our messages and those of health are in different pools.
        self._pool = DescriptorPool()
        files = [file for service in services for file in service.files]
        for file in (*files, reflection_pb2.DESCRIPTOR):
            self._pool.AddSerializedFile(file.serialized_pb)

    def services(self) -> tuple[Service, ...]:
        """Both versions of the protocol."""
        method = streamed(self._serve).of(ApiGroup.METADATA)
        return tuple(Service(name, {"ServerReflectionInfo": method}) for name in SERVICES)

    async def _serve(self, call: StreamCall) -> None:
        async for message in call.messages:
            await call.send((self._answer(message).SerializeToString(),))

    def _answer(self, message: Buffer) -> reflection_pb2.ServerReflectionResponse:
        request = parse(reflection_pb2.ServerReflectionRequest, message)
        response = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for service in self._services:
                response.list_services_response.service.add(name=service)
            return response
        try:
            files = self._files(request, kind)
        except KeyError as error:
            response.error_response.error_code = Status.NOT_FOUND
            response.error_response.error_message = str(error.args[0])
            return response
        if files is None:
            response.error_response.error_code = Status.UNIMPLEMENTED
            response.error_response.error_message = f"reflection request '{kind}' is not supported: proto3 only"
            return response
        response.file_descriptor_response.file_descriptor_proto.extend(file.serialized_pb for file in files)
        return response

    def _files(self, request: reflection_pb2.ServerReflectionRequest, kind: str | None) -> list[FileDescriptor] | None:
        """The requested file, then its dependencies; KeyError if it is unknown, None for other kinds of request."""
        if kind == "file_by_filename":
            return _with_imports(self._pool.FindFileByName(request.file_by_filename))
        if kind == "file_containing_symbol":
            return _with_imports(self._file_containing(request.file_containing_symbol))
        return None

    def _file_containing(self, symbol: str) -> FileDescriptor:
        service, _, method = symbol.rpartition(".")
        # The pool knows every symbol but the methods of services.
        if service in self._services and method in self._pool.FindServiceByName(service).methods_by_name:
            symbol = service
        return self._pool.FindFileContainingSymbol(symbol)


def _with_imports(file: FileDescriptor) -> list[FileDescriptor]:
    found = {file.name: file}
    pending = [file]
    while pending:
        for imported in pending.pop().dependencies:
            if imported.name not in found:
                found[imported.name] = imported
                pending.append(imported)
    return list(found.values())

"""The shared memory extensions over gRPC: regions that clients register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from modelserver.frontends.grpc.edge import answered, fail, parse
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import Method, UnaryCall

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane


class Regions:
    """Answers the methods of system and CUDA shared memory. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    def methods(self) -> Mapping[str, Method]:
        """By name within the service."""
        return {
            "SystemSharedMemoryStatus": answered(pb.SystemSharedMemoryStatusRequest, self._status),
            "SystemSharedMemoryRegister": answered(pb.SystemSharedMemoryRegisterRequest, self._register),
            "SystemSharedMemoryUnregister": answered(pb.SystemSharedMemoryUnregisterRequest, self._unregister),
            "CudaSharedMemoryStatus": answered(pb.CudaSharedMemoryStatusRequest, self._cuda_status),
            "CudaSharedMemoryRegister": Method(unary=self._cuda_register),
            "CudaSharedMemoryUnregister": answered(pb.CudaSharedMemoryUnregisterRequest, self._cuda_unregister),
        }

    def _status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        regions = {
            row.name: pb.SystemSharedMemoryStatusResponse.RegionStatus(
                name=row.name, key=row.key, offset=row.offset, byte_size=row.num_bytes
            )
            for row in self._dataplane.shared_memory.statuses(request.name)
        }
        return pb.SystemSharedMemoryStatusResponse(regions=regions)

    def _register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        self._dataplane.shared_memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> pb.SystemSharedMemoryUnregisterResponse:
        """Clients unregister all regions before they know whether any exist."""
        self._dataplane.shared_memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        regions = {
            row.name: pb.CudaSharedMemoryStatusResponse.RegionStatus(
                name=row.name, device_id=row.device_id, byte_size=row.num_bytes
            )
            for row in self._dataplane.shared_memory.cuda_statuses(request.name)
        }
        return pb.CudaSharedMemoryStatusResponse(regions=regions)

    def _cuda_register(self, call: UnaryCall) -> None:
        """Answered when the memory is mapped, which takes long."""

        def registered(result: Callable[[], None]) -> None:
            try:
                result()
            except Exception as error:
                fail(call, error)
            else:
                call.reply((pb.CudaSharedMemoryRegisterResponse().SerializeToString(),))

        try:
            request = parse(pb.CudaSharedMemoryRegisterRequest, call.message)
            self._dataplane.shared_memory.register_cuda(
                request.name, request.raw_handle, request.device_id, request.byte_size, registered
            )
        except Exception as error:
            fail(call, error)

    def _cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        self._dataplane.shared_memory.unregister(request.name, is_cuda=True)
        return pb.CudaSharedMemoryUnregisterResponse()

"""KServe's gRPC service: every method as a handler that knows no socket and no grpcio."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.config.message import config_to_message
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.execution.model import Model
from modelserver.frontends.grpc.edge import Tasks, answered, awaited, fail, parse
from modelserver.frontends.grpc.head import decode_version
from modelserver.frontends.grpc.inference import Inference
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.pb import model_config_pb2
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.planes.data import ModelMetadata, ServerMetadata, TensorMetadata
from modelserver.protocol.call import Method, Service, UnaryCall
from modelserver.protocol.kserve import SERVICE
from modelserver.protocol.limits import GrpcLimits
from modelserver.repository.state import IndexEntry
from modelserver.repository.traffic import Traffic
from modelserver.telemetry.statistics_snapshot import DurationStat, ResponseStat, StatisticsSnapshot


class Settings:
    """Answers LogSettings and TraceSetting. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self.log: Method = answered(pb.LogSettingsRequest, self._log)
        self.trace: Method = answered(pb.TraceSettingRequest, self._trace)

    def _trace(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """A setting without values is unset."""
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        settings = self._dataplane.update_trace_settings(changes, request.model_name)
        return pb.TraceSettingResponse(
            settings={
                name: pb.TraceSettingResponse.SettingValue(value=[value] if isinstance(value, str) else value)
                for name, value in settings.items()
            }
        )

    def _log(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        changes = {
            name: None if (kind := value.WhichOneof("parameter_choice")) is None else getattr(value, kind)
            for name, value in request.settings.items()
        }
        settings = self._controlplane.logs.update(changes)
        return pb.LogSettingsResponse(settings={name: _value(value) for name, value in asdict(settings).items()})


def _value(value: Any) -> pb.LogSettingsResponse.SettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponse.SettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponse.SettingValue(uint32_param=value)
    return pb.LogSettingsResponse.SettingValue(string_param=value)


class KServe:
    """KServe v2 with Triton's extensions over the two planes. Everything runs on the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: GrpcLimits) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._inference = Inference(dataplane, limits)
        self._tasks = Tasks()

    def service(self) -> Service:
        """All of its methods."""
        methods = {
            name: method.of(group) for group, methods in self._methods().items() for name, method in methods.items()
        }
        # Load balancers, which have no key, call these.
        for name in ("ServerLive", "ServerReady"):
            methods[name] = methods[name].of(ApiGroup.HEALTH, KeyUse.UNUSED)
        return Service(
            SERVICE,
            {**methods, **self._inference.methods},
            (model_config_pb2.DESCRIPTOR, pb.DESCRIPTOR),
            self._inference.drain,
        )

    def _methods(self) -> Mapping[ApiGroup, Mapping[str, Method]]:
        """By the group, which sets the requirements, and the name."""
        regions, settings = Regions(self._dataplane), Settings(self._dataplane, self._controlplane)
        return {
            ApiGroup.HEALTH: {
                "ServerLive": answered(pb.ServerLiveRequest, self._server_live),
                "ServerReady": answered(pb.ServerReadyRequest, self._server_ready),
                "ModelReady": answered(pb.ModelReadyRequest, self._model_ready),
            },
            ApiGroup.METADATA: {
                "ServerMetadata": answered(pb.ServerMetadataRequest, self._server_metadata),
                "ModelMetadata": answered(pb.ModelMetadataRequest, self._model_metadata),
            },
            ApiGroup.MODEL_CONFIG: {"ModelConfig": answered(pb.ModelConfigRequest, self._model_config)},
            ApiGroup.STATISTICS: {"ModelStatistics": answered(pb.ModelStatisticsRequest, self._model_statistics)},
            ApiGroup.MODEL_REPOSITORY: {
                "RepositoryIndex": answered(pb.RepositoryIndexRequest, self._repository_index),
                "RepositoryModelLoad": awaited(pb.RepositoryModelLoadRequest, self._load, self._tasks),
                "RepositoryModelUnload": awaited(pb.RepositoryModelUnloadRequest, self._unload, self._tasks),
                "RepositoryModelTraffic": awaited(pb.RepositoryModelTrafficRequest, self._traffic, self._tasks),
            },
            ApiGroup.SHARED_MEMORY: regions.methods(),
            ApiGroup.LOGGING: {"LogSettings": settings.log},
            ApiGroup.TRACE: {"TraceSetting": settings.trace},
        }

    def _server_live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._dataplane.is_live)

    def _server_ready(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._dataplane.is_ready)

    def _model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            is_ready = self._dataplane.model_is_ready(request.name, decode_version(request.version))
        except NotFoundError:
            # Triton's clients ask this of models that may not exist and expect a plain "no".
            is_ready = False
        return pb.ModelReadyResponse(ready=is_ready)

    def _server_metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return server_metadata(self._dataplane.server_metadata())

    def _model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        version = decode_version(request.version)
        return model_metadata(self._dataplane.model_metadata(request.name, version))

    def _model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        config = self._dataplane.model_config(request.name, decode_version(request.version))
        return pb.ModelConfigResponse(config=config_to_message(config))

    def _model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        version = decode_version(request.version)
        return statistics(self._dataplane.statistics(request.name, version))

    # Repository control.

    def _repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        return repository_index(
            self._controlplane.index(ready_only=request.ready, repository_name=request.repository_name)
        )

    async def _load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        model, repository = _names(request)
        await self._controlplane.load(model, _repository_parameters(request), repository_name=repository)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        model, repository = _names(request)
        await self._controlplane.unload(model, _repository_parameters(request), repository_name=repository)
        return pb.RepositoryModelUnloadResponse()

    async def _traffic(self, request: pb.RepositoryModelTrafficRequest) -> pb.RepositoryModelTrafficResponse:
        name = request.model_name
        if request.remove:
            await self._controlplane.remove_traffic(name)
        elif request.HasField("traffic"):
            await self._controlplane.set_traffic(name, traffic_document(request.traffic), persists=request.persist)
        return traffic_reply(self._controlplane.traffic(name), self._controlplane.traffic_shares(name))


_RepositoryRequest = pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest


def _names(request: _RepositoryRequest) -> tuple[str, str]:
    """Model and repository. KServe's message has the model's name in the field that is Triton's repository_name."""
    if request.model_name:
        return request.model_name, request.repository_name
    return request.repository_name, ""


def _repository_parameters(request: _RepositoryRequest) -> dict[str, bool | int | str | bytes]:
    parameters = {}
    for key, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgumentError(f"parameter '{key}' has no value")
        parameters[key] = getattr(parameter, kind)
    return parameters


def server_metadata(metadata: ServerMetadata) -> pb.ServerMetadataResponse:
    return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


def model_metadata(metadata: ModelMetadata) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=_tensors(metadata.inputs),
        outputs=_tensors(metadata.outputs),
    )


def _tensors(tensors: Iterable[TensorMetadata]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for tensor in tensors
    ]


def statistics(models: Iterable[tuple[Model, StatisticsSnapshot]]) -> pb.ModelStatisticsResponse:
    return pb.ModelStatisticsResponse(model_stats=[_model_statistics(model, snapshot) for model, snapshot in models])


def _model_statistics(model: Model, snapshot: StatisticsSnapshot) -> pb.ModelStatistics:
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=snapshot.last_inference_ms,
        inference_count=snapshot.inference_count,
        execution_count=snapshot.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(snapshot.success),
            fail=_duration(snapshot.fail),
            queue=_duration(snapshot.queue),
            compute_input=_duration(snapshot.compute_input),
            compute_infer=_duration(snapshot.compute_infer),
            compute_output=_duration(snapshot.compute_output),
            cache_hit=_duration(snapshot.cache_hit),
            cache_miss=_duration(snapshot.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=rows,
                compute_input=_duration(stat.compute_input),
                compute_infer=_duration(stat.compute_infer),
                compute_output=_duration(stat.compute_output),
            )
            for rows, stat in sorted(snapshot.batch_stats.items())
        ],
        memory_usage=[
            pb.MemoryUsage(type=usage.kind, id=usage.id, byte_size=usage.byte_size) for usage in model.memory_usage()
        ],
        response_stats={str(position): _response(stat) for position, stat in snapshot.response_stats.items()},
    )


def _response(stat: ResponseStat) -> pb.InferResponseStatistics:
    return pb.InferResponseStatistics(
        compute_infer=_duration(stat.compute_infer),
        compute_output=_duration(stat.compute_output),
        success=_duration(stat.success),
        fail=_duration(stat.fail),
        empty_response=_duration(stat.empty_response),
        cancel=_duration(stat.cancel),
    )


def _duration(stat: DurationStat) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=stat.count, ns=stat.ns)


def repository_index(entries: Iterable[IndexEntry]) -> pb.RepositoryIndexResponse:
    """Unknown versions and states are left out, as in Triton."""
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name,
                version="" if entry.version is None else str(entry.version),
                state="" if entry.state.value == "UNKNOWN" else entry.state.value,
                reason=entry.reason,
                repository=entry.repository,
            )
            for entry in entries
        ]
    )


def traffic_document(message: pb.ModelTraffic) -> dict[str, Any]:
    """The message's content in the form of the JSON."""
    document: dict[str, Any] = {
        "weights": dict(message.weights),
        "sticky_by": message.sticky_by,
        "shadows": dict(message.shadows),
    }
    if message.HasField("tolerance"):
        document["tolerance"] = message.tolerance
    return document


def traffic_reply(traffic: Traffic | None, shares: Mapping[int, float]) -> pb.RepositoryModelTrafficResponse:
    """The current traffic."""
    if traffic is None:
        return pb.RepositoryModelTrafficResponse()
    return pb.RepositoryModelTrafficResponse(
        traffic=pb.ModelTraffic(
            weights=dict(traffic.weights),
            sticky_by=traffic.sticky_by,
            shadows=dict(traffic.shadows),
            tolerance=traffic.tolerance,
        ),
        shares=dict(shares),
    )


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

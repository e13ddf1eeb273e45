"""The gRPC frontend: every method of our services as a handler that knows no socket and no grpcio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from modelserver.auth.access import ApiGroup
from modelserver.config.message import config_to_message
from modelserver.core.long_work import Result, long_work
from modelserver.core.request import InferRequest, forward, set_context
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.frontends.grpc import codec, replies
from modelserver.frontends.grpc.access_log import with_access_log
from modelserver.frontends.grpc.decoder import InferDecoder
from modelserver.frontends.grpc.edge import answered, awaited, fail, streamed
from modelserver.frontends.grpc.head import decode_version
from modelserver.frontends.grpc.health import Health
from modelserver.frontends.grpc.peers import with_peers
from modelserver.frontends.grpc.reflection import SERVICES as REFLECTION_SERVICES
from modelserver.frontends.grpc.reflection import Reflection
from modelserver.frontends.grpc.regions import Regions
from modelserver.frontends.grpc.restricted import restricted
from modelserver.frontends.grpc.settings import Settings
from modelserver.frontends.grpc.stream import InferStream
from modelserver.frontends.grpc.tasks import Tasks
from modelserver.frontends.grpc.traffic import traffic_document, traffic_reply
from modelserver.frontends.grpc.unary import UnaryReply
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.pb import model_config_pb2
from modelserver.protocol.call import Method, StreamCall, UnaryCall
from modelserver.protocol.kserve import SERVICE
from modelserver.protocol.limits import DEFAULT_GRPC_LIMITS, GrpcLimits

if TYPE_CHECKING:
    from modelserver.planes.control import AnyControlPlane
    from modelserver.planes.data import AnyDataPlane

# Streams are read on at a drain: what their clients sent before they could know of it.
_LAST_REQUESTS_S = 0.25


class GrpcFrontend:
    """KServe v2 with Triton's extensions, grpc.health.v1 and reflection over the two planes.

    `methods` maps full method names to handlers. Everything runs on the event loop thread.
    """

    def __init__(
        self,
        dataplane: AnyDataPlane,
        controlplane: AnyControlPlane,
        limits: GrpcLimits = DEFAULT_GRPC_LIMITS,
        *,
        health_watch_interval_s: float = 0.5,
    ) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._limits = limits
        self._decoder = InferDecoder(limits)
        self._forwards = bool(limits.access.forward_pattern)
        self._reads_context = limits.access.reads_context
        self._names_callers = bool(limits.access.callers_by)
        self._tasks = Tasks()
        self._streams: set[InferStream] = set()
        self._draining = asyncio.Event()
        health = Health(dataplane, self._draining, watch_interval_s=health_watch_interval_s)
        reflection = Reflection(
            services=(SERVICE, "grpc.health.v1.Health", *REFLECTION_SERVICES),
            files=(
                model_config_pb2.DESCRIPTOR,
                pb.DESCRIPTOR,
                health_pb2.DESCRIPTOR,
                reflection_pb2.DESCRIPTOR,
            ),
        )
        own = {
            f"/{SERVICE}/{name}": method.of(group)
            for group, methods in self._own_methods().items()
            for name, method in methods.items()
        }
        methods = {
            **own,
            **{path: method.of(ApiGroup.HEALTH) for path, method in health.methods.items()},
            **{path: method.of(ApiGroup.METADATA) for path, method in reflection.methods.items()},
        }
        guarded = with_peers(self._guard(restricted(methods, limits.access)))
        self.methods: Mapping[str, Method] = with_access_log(guarded, is_logged=limits.access.is_logged)

    def _guard(self, methods: Mapping[str, Method]) -> Mapping[str, Method]:
        """What stands before the methods; here nothing."""
        return methods

    def drain(self) -> None:
        """Open streams soon take no more requests, and end when those in flight are answered. Called once."""
        self._draining.set()
        for stream in self._streams:
            self._drain_soon(stream)

    def _drain_soon(self, stream: InferStream) -> None:
        """What the client sent before it could know is taken."""
        asyncio.get_running_loop().call_later(_LAST_REQUESTS_S, stream.drain)

    def _own_methods(self) -> Mapping[ApiGroup, Mapping[str, Method]]:
        """By the group, which says what a caller needs, and the name."""
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
            ApiGroup.INFERENCE: {
                "ModelInfer": Method(unary=self._model_infer),
                "ModelStreamInfer": streamed(self._model_stream_infer),
            },
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

    # Inference.

    def _model_infer(self, call: UnaryCall) -> None:
        reply = UnaryReply(call)
        try:
            decoded = self._decoder.decode_on_loop(call.message, reply)
            if isinstance(decoded, codec.Outline):
                self._dataplane.check_inputs(decoded.request)
                infer = partial(self._infer_decoded, call, reply)
                call.on_cancel = long_work().start(self._decoder.element_slices(decoded), infer)
                return
        except Exception as error:
            reply.release()
            fail(call, error)
        else:
            self._infer(call, reply, decoded)

    def _infer_decoded(self, call: UnaryCall, reply: UnaryReply, result: Result[InferRequest]) -> None:
        try:
            request = result()
        except Exception as error:
            reply.release()
            fail(call, error)
        else:
            self._infer(call, reply, request)

    def _infer(self, call: UnaryCall, reply: UnaryReply, request: InferRequest) -> None:
        try:
            if call.deadline_ns is not None:
                request.deadline_ns = call.deadline_ns
            if self._forwards and (headers := self._limits.access.forwarded(call.metadata)):
                forward(request, headers)
            if self._reads_context and (context := self._limits.access.context(call.metadata)):
                set_context(request, context)
            if self._names_callers:
                request.caller = self._limits.access.caller(call.metadata, call.peer)
            reply.request = request
            self._dataplane.infer(request)
        except Exception as error:
            reply.release()
            fail(call, error)
        else:
            if not reply.is_answered:
                call.on_cancel = request.cancel

    async def _model_stream_infer(self, call: StreamCall) -> None:
        stream = InferStream(call, self._dataplane, self._decoder, self._limits)
        self._streams.add(stream)
        if self._draining.is_set():
            self._drain_soon(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    # Health, metadata, statistics.

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
        return replies.server_metadata(self._dataplane.server_metadata())

    def _model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        version = decode_version(request.version)
        return replies.model_metadata(self._dataplane.model_metadata(request.name, version))

    def _model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        config = self._dataplane.model_config(request.name, decode_version(request.version))
        return pb.ModelConfigResponse(config=config_to_message(config))

    def _model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        version = decode_version(request.version)
        return replies.statistics(self._dataplane.statistics(request.name, version))

    # Repository control.

    def _repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        return replies.repository_index(
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

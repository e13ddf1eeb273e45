"""grpc.health.v1.Health, for load balancers and Kubernetes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from grpc_health.v1 import health_pb2

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.frontends.grpc.edge import answered, parse, streamed
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.call import Service, StreamCall

SERVICE = "grpc.health.v1.Health"
# The whole server, under the two names that clients use; any other name is a model's.
_SERVER_NAMES = ("", "inference.GRPCInferenceService")


class Health:
    """Readiness of the server and, by name, of each model. A caller with a key can also ask for its models.

    `Watch` looks at the data plane every `watch_interval_s` seconds and reports changes; it ends when the
    server drains, so that watchers do not hold up the shutdown.
    """

    def __init__(self, dataplane: AnyDataPlane, *, watch_interval_s: float = 0.5) -> None:
        self._dataplane = dataplane
        self._draining = asyncio.Event()
        self._watch_interval_s = watch_interval_s

    def service(self) -> Service:
        methods = {
            "Check": answered(health_pb2.HealthCheckRequest, self._check),
            "Watch": streamed(self._watch),
        }
        return Service(
            SERVICE,
            {name: method.of(ApiGroup.HEALTH, KeyUse.OPTIONAL) for name, method in methods.items()},
            (health_pb2.DESCRIPTOR,),
            self._draining.set,
        )

    def _check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def _watch(self, call: StreamCall) -> None:
        message = await anext(call.messages, None)
        if message is None:
            raise InvalidArgumentError("Watch needs a HealthCheckRequest, got none")
        service = parse(health_pb2.HealthCheckRequest, message).service
        reported = None
        while True:
            # Read first: a report after the drain began is the last one.
            is_last = self._draining.is_set()
            status = self._watched_status(service)
            if status != reported:
                await call.send((health_pb2.HealthCheckResponse(status=status).SerializeToString(),))
                reported = status
            if is_last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), self._watch_interval_s)

    def _watched_status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        try:
            return self._status(service)
        except NotFoundError:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service in _SERVER_NAMES:
            is_serving = self._dataplane.is_ready
        else:
            is_serving = not self._dataplane.is_shutting_down and self._dataplane.model_is_ready(service)
        response = health_pb2.HealthCheckResponse
        return response.SERVING if is_serving else response.NOT_SERVING

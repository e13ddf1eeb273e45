"""The gRPC frontend: services behind one guard, and reflection of them. Knows no method of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelserver.auth.guard import Guard
from modelserver.frontends.grpc.access_log import with_access_log
from modelserver.frontends.grpc.guarded import guarded
from modelserver.protocol.call import Method, Service


class GrpcFrontend:
    """`methods` maps full method names to handlers. Everything runs on the event loop thread."""

    def __init__(self, services: Sequence[Service], guard: Guard, *, is_logged: bool = False) -> None:
        """`is_logged`: each call has a line in the access log."""
        self._services = tuple(services)
        methods = {
            path: guarded(path, method, guard)
            for service in services
            for name, method in service.methods.items()
            for path in (f"/{service.name}/{name}",)
        }
        self.methods: Mapping[str, Method] = with_access_log(methods, is_logged=is_logged)

    def drain(self) -> None:
        """Open streams soon take no more requests, and end when those in flight are answered. Called once."""
        for service in self._services:
            if service.drain is not None:
                service.drain()

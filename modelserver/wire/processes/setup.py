"""The data that a front process needs to serve, given to it at its start."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from modelserver.auth.access import ApiGroup
from modelserver.auth.api_keys import Scope
from modelserver.auth.guard import KeyUse, Needs
from modelserver.execution.process.shared_buffer import SharedBuffer
from modelserver.planes.data import DataPlane
from modelserver.protocol.api import Api
from modelserver.protocol.call import GrpcHandler
from modelserver.protocol.exchange import HttpHandler
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.protocol.response import ErrorWriter
from modelserver.wire.limits import WireLimits
from modelserver.wire.tls import TlsFiles

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PortSetup:
    """One port as a front serves it; `name` is the log's, with its address."""

    name: str
    has_http: bool
    has_grpc: bool
    limits: WireLimits
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class CallNeeds:
    """A call's requirements, by the names of its group, scope and use of keys."""

    group: str
    scope: str
    key: str

    @property
    def parts(self) -> tuple[ApiGroup, Scope, KeyUse]:
        """The requirements that the names stand for."""
        return ApiGroup(self.group), Scope(self.scope), KeyUse(self.key)


@dataclass(frozen=True, slots=True)
class RouteCall:
    """A route of HTTP without its handler."""

    method: str
    pattern: str
    needs: CallNeeds
    model: str


@dataclass(frozen=True, slots=True)
class ApiCalls:
    """An API without its handlers; `errors` is the class of its error writer, as "module:Class".

    `errors` is empty if the class cannot be made from its name: then only the core writes this API's errors.
    """

    name: str
    beginnings: tuple[str, ...]
    routes: tuple[RouteCall, ...]
    errors: str = ""

    def error_writer(self) -> ErrorWriter | None:
        """The writer of the API's errors; None if only the core has it. Imports the module of an installed API."""
        if not self.errors:
            return None
        module, _, name = self.errors.partition(":")
        try:
            writer = getattr(importlib.import_module(module), name)()
        except Exception as error:
            _logger.warning("the core writes the errors of the API '%s': %s here: %s", self.name, self.errors, error)
            return None
        return writer if isinstance(writer, ErrorWriter) else None


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method of gRPC without its handler."""

    path: str
    is_stream: bool
    needs: CallNeeds


@dataclass(frozen=True, slots=True)
class FrontCalls:
    """The calls that the core answers: fronts check calls by their heads, and pass on those that they do not answer."""

    apis: tuple[ApiCalls, ...] = ()
    methods: tuple[MethodCall, ...] = ()


def _describe_api(api: Api) -> ApiCalls:
    routes = tuple(
        RouteCall(route.method, route.pattern, _describe_needs(route.needs), route.model) for route in api.routes
    )
    return ApiCalls(api.name, api.beginnings, routes, _name_of(api.errors))


def _name_of(errors: ErrorWriter) -> str:
    """The class of a writer that has no state; empty for other writers, and for a class that no module has by name."""
    kind = type(errors)
    has_state = bool(getattr(errors, "__dict__", {})) or any(getattr(each, "__slots__", ()) for each in kind.__mro__)
    module = sys.modules.get(kind.__module__)
    if has_state or kind.__module__ == "__main__" or getattr(module, kind.__qualname__, None) is not kind:
        return ""
    return f"{kind.__module__}:{kind.__qualname__}"


def _describe_needs(needs: Needs) -> CallNeeds:
    return CallNeeds(needs.group.value, needs.scope.value, needs.key.value)


@dataclass(frozen=True, slots=True)
class FrontSetup:
    """A front: its ports, and the limits of its frontends. `loop` is "uvloop" or "asyncio"."""

    ports: tuple[PortSetup, ...]
    http_limits: HttpLimits = field(default_factory=HttpLimits)
    grpc_limits: GrpcLimits = field(default_factory=GrpcLimits)
    calls: FrontCalls = field(default_factory=FrontCalls)
    loop: str = "asyncio"
    log_level: int = 20

    def share(self, num_fronts: int) -> FrontSetup:
        """With the part of each limit on the whole server that one of `num_fronts` may use."""
        return replace(self, ports=tuple(replace(port, limits=_share(port.limits, num_fronts)) for port in self.ports))

    def arguments(self) -> dict[str, Any]:
        """As what msgpack carries; `from_arguments` reads it."""
        plain = msgspec.to_builtins(self)
        assert isinstance(plain, dict), "a dataclass becomes a dict"
        return plain

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> FrontSetup:
        return msgspec.convert(arguments, cls)


def _share(limits: WireLimits, num_fronts: int) -> WireLimits:
    # Rounded up; connections are dealt evenly, so each front needs no more.
    return replace(
        limits,
        max_connections=-(-limits.max_connections // num_fronts),
        max_assembly_bytes=-(-limits.max_assembly_bytes // num_fronts),
    )


@dataclass(frozen=True, slots=True)
class CorePlanes:
    """The frontends of the core; one is None if no port serves its protocol.

    `recognizes` is the limits': whether repeated requests are recognised by their bytes.
    """

    dataplane: DataPlane
    http: HttpHandler | None
    grpc: GrpcHandler | None
    http_apis: tuple[Api, ...] = ()
    recognizes: bool = True

    def calls(self) -> FrontCalls:
        """Their description for a front."""
        methods = self.grpc.methods if self.grpc is not None else {}
        return FrontCalls(
            tuple(map(_describe_api, self.http_apis)),
            tuple(
                MethodCall(path, method.stream is not None, _describe_needs(method.needs))
                for path, method in methods.items()
            ),
        )


class FrontSockets:
    """The core's ends of what connects it with one front: messages, connections, and memory both ways."""

    def __init__(self, name: str) -> None:
        self.link, self._their_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.handover, self._their_handover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.to_front = SharedBuffer.create(f"{name}:answers")
        self.from_front = SharedBuffer.create(f"{name}:requests")
        self.handover.setblocking(False)
        # The descriptors that the front inherits: link, handover, its outgoing and its incoming memory.
        self.descriptors = (
            self._their_link.fileno(),
            self._their_handover.fileno(),
            self.from_front.fd,
            self.to_front.fd,
        )

    def close_theirs(self) -> None:
        """The front has its copies."""
        self._their_link.close()
        self._their_handover.close()

    def close(self) -> None:
        """Close the ends that no session has taken over."""
        self.close_theirs()
        self.link.close()
        self.handover.close()
        self.to_front.close()
        self.from_front.close()

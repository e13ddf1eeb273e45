"""The server's ports, the frontends that each serves, and their limits: made from the options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from modelserver.app.logs import own_level
from modelserver.auth.access import is_loopback
from modelserver.core.numerals import is_digits
from modelserver.options.server_options import ServerOptions
from modelserver.options.table import option_table
from modelserver.planes.data import DataPlane
from modelserver.protocol.api import Api
from modelserver.protocol.call import GrpcHandler
from modelserver.protocol.exchange import HttpHandler
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.telemetry.log_settings import LogControl
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.address import Address
from modelserver.wire.limits import Http2Limits, KeepaliveLimits, TimeLimits, WireLimits
from modelserver.wire.native_server import NativeServer
from modelserver.wire.port import NoHttp
from modelserver.wire.processes.server import FrontPort, WireProcesses
from modelserver.wire.processes.setup import CorePlanes
from modelserver.wire.tls import TlsFiles

HTTP, GRPC, METRICS = "HTTP", "gRPC", "metrics"
SAGEMAKER, VERTEX_AI, OLLAMA = "SageMaker", "Vertex AI", "Ollama's clients"
# The flags of ports that Triton has too, and what it calls their servers in errors.
_PORT_FLAGS = {
    METRICS: ("--metrics-port", "Metrics"),
    SAGEMAKER: ("--sagemaker-port", "Sagemaker"),
    VERTEX_AI: ("--vertex-ai-port", "Vertex AI"),
}


class Wire(Protocol):
    """A port that listens from `start` to `stop`."""

    @property
    def port(self) -> int: ...

    async def start(self) -> None:
        """Raises UnavailableError, naming the flag, when the address is not available."""

    def retire(self) -> None:
        """Serve requests, and let answers tell clients, where the protocol can, to send the next ones elsewhere."""

    async def stop(self, grace_s: float) -> None:
        """Accept no more, give requests in flight `grace_s` seconds to finish, then fail the rest."""


@dataclass(frozen=True, slots=True)
class OwnPort:
    """A frontend on a port of its own, and its address."""

    frontend: HttpHandler
    address: Address


@dataclass(frozen=True, slots=True)
class Frontends:
    """The frontends to serve, over `dataplane`; None for one that a flag turns off.

    `http_apis` are those of `http`, and `own` are ports by their names. A program without models has no `dataplane`,
    and no front processes.
    """

    dataplane: DataPlane | None
    http: HttpHandler | None
    grpc: GrpcHandler | None
    http_apis: tuple[Api, ...] = ()
    own: Mapping[str, OwnPort] = field(default_factory=dict)
    logs: LogControl = field(default_factory=LogControl)


def make_ports(options: ServerOptions, frontends: Frontends, counts: WireCounts) -> dict[str, Wire]:
    """The ports by purpose; a port with two purposes appears twice.

    Raises InvalidArgumentError when a file that a TLS flag names is invalid.
    """
    make = _native_ports if options.wire == "native" else _reference_ports
    return make(options, frontends, counts)


def wire_limits(options: ServerOptions) -> WireLimits:
    """The limits of our own wire."""
    age_ms, grace_ms = options.grpc_max_connection_age, options.grpc_max_connection_age_grace
    return WireLimits(
        max_connections=options.max_connections,
        max_body_bytes=options.http_max_input_size,
        max_message_bytes=options.grpc_max_request_size,
        times=TimeLimits(http1_idle_s=options.http_idle_timeout, body_rate=options.min_body_rate),
        http2=Http2Limits(max_concurrent_streams=options.max_concurrent_streams),
        keepalive=KeepaliveLimits(
            ping_after_s=options.grpc_keepalive_time / 1000,
            ping_timeout_s=options.grpc_keepalive_timeout / 1000,
            ping_without_calls=options.grpc_keepalive_permit_without_calls,
            min_ping_interval_s=options.grpc_http2_min_recv_ping_interval_without_data / 1000,
            max_ping_strikes=options.grpc_http2_max_ping_strikes,
            max_pings_without_data=options.grpc_http2_max_pings_without_data,
            max_age_s=None if age_ms is None else age_ms / 1000,
            max_age_grace_s=None if grace_ms is None else grace_ms / 1000,
        ),
        grpc_compression=options.grpc_infer_response_compression_level,
        busy_poll_percent=options.busy_poll_percent,
        recognizes=options.recognize_requests,
    )


def http_limits(options: ServerOptions) -> HttpLimits:
    """The limits of the HTTP frontend."""
    return HttpLimits(
        max_body_bytes=options.http_max_input_size,
        recognizes=options.recognize_requests,
        media_domains=options.allowed_media_domains,
        access=options.http_access,
        cors=replace(options.http_cors, is_local=is_loopback(options.http_host)),
    )


def grpc_limits(options: ServerOptions) -> GrpcLimits:
    """The limits of the gRPC frontend."""
    return GrpcLimits(recognizes=options.recognize_requests, access=options.grpc_access)


def _http_address(options: ServerOptions) -> Address:
    return Address(options.http_host, options.http_port, "--http-port", options.reuse_http_port)


def _grpc_address(options: ServerOptions) -> Address:
    return Address(options.grpc_host, options.grpc_port, "--grpc-port", options.reuse_grpc_port, "GRPC")


def own_address(options: ServerOptions, api: Api) -> Address:
    """The address of an API with a port of its own: on HTTP's host, except for the metrics."""
    assert api.port is not None, f"the API '{api.name}' has no port of its own"
    host = options.metrics_host if api.name == METRICS else options.http_host
    flag, service = _PORT_FLAGS.get(api.name, (f"--api={api.name}", api.name))
    return Address(host, api.port, flag, options.reuse_http_port, service)


def vertex_ai_port(options: ServerOptions) -> int:
    """The flag's, or, where it is left at its default, the one that Vertex AI names in AIP_HTTP_PORT."""
    text = os.environ.get("AIP_HTTP_PORT", "")
    default = next(option.default for option in option_table() if option.name == "vertex_ai_port")
    return int(text) if options.vertex_ai_port == default and is_digits(text) else options.vertex_ai_port


def _native_ports(options: ServerOptions, frontends: Frontends, counts: WireCounts) -> dict[str, Wire]:
    limits = wire_limits(options)
    every_tls = _tls_files(options)
    ports: dict[str, Wire] = {}
    for name, own in frontends.own.items():
        ports[name] = NativeServer(
            own.address, http=own.frontend, limits=limits, counts=counts, tls=every_tls, name=name
        )
    # A certificate for the gRPC port means that gRPC must be protected: no other port may offer it.
    is_shared = options.shared_ports and not options.is_grpc_tls
    has_http, has_grpc = frontends.http is not None, frontends.grpc is not None
    plans: dict[str, FrontPort] = {}
    if has_http:
        plans[HTTP] = FrontPort(
            _http_address(options),
            has_grpc=has_grpc and is_shared,
            limits=limits,
            counts=counts,
            tls=every_tls,
            name="HTTP and gRPC" if has_grpc and is_shared else "HTTP",
        )
    if has_grpc and not options.is_one_port:
        plans[GRPC] = FrontPort(
            _grpc_address(options),
            has_http=has_http and options.shared_ports,
            limits=limits,
            counts=counts,
            tls=_grpc_tls_files(options) or every_tls,
            name="gRPC and HTTP" if has_http and options.shared_ports else "gRPC",
        )
    make = _servers if options.wire_processes == 1 else _processes
    ports |= make(options, frontends, plans)
    if has_grpc and options.is_one_port:
        ports[GRPC] = ports[HTTP]
    return ports


def _servers(_options: ServerOptions, frontends: Frontends, plans: Mapping[str, FrontPort]) -> dict[str, Wire]:
    """The ports, served in this process."""
    return {
        name: NativeServer(
            plan.address,
            http=frontends.http if plan.has_http else NoHttp(),
            grpc=frontends.grpc if plan.has_grpc else None,
            limits=plan.limits,
            counts=plan.counts,
            tls=plan.tls,
            name=plan.name,
        )
        for name, plan in plans.items()
    }


def _processes(options: ServerOptions, frontends: Frontends, plans: Mapping[str, FrontPort]) -> dict[str, Wire]:
    """The ports, served by processes of their own."""
    assert frontends.dataplane is not None, "front processes stand before models"
    processes = WireProcesses(
        options.wire_processes,
        tuple(plans.values()),
        CorePlanes(
            frontends.dataplane, frontends.http, frontends.grpc, frontends.http_apis, options.recognize_requests
        ),
        http_limits=http_limits(options),
        grpc_limits=grpc_limits(options),
        log_level=own_level(frontends.logs.settings),
    )
    frontends.logs.follow(lambda settings: processes.set_log_level(own_level(settings)))
    return dict(zip(plans, processes.wires, strict=True))


def _reference_ports(options: ServerOptions, frontends: Frontends, _counts: WireCounts) -> dict[str, Wire]:
    # Imported only when needed: our own wire does not use it.
    from modelserver.wire.reference.grpcio_server import GrpcioServer
    from modelserver.wire.reference.uvicorn_server import UvicornServer

    limits = wire_limits(options)
    ports: dict[str, Wire] = {}
    for name, own in frontends.own.items():
        ports[name] = UvicornServer(own.frontend, own.address, limits)
    if frontends.http is not None:
        ports[HTTP] = UvicornServer(frontends.http, _http_address(options), limits)
    if frontends.grpc is not None:
        ports[GRPC] = GrpcioServer(frontends.grpc, _grpc_address(options), limits)
    return ports


def _tls_files(options: ServerOptions) -> TlsFiles | None:
    if not options.tls_cert:
        return None
    return TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)


def _grpc_tls_files(options: ServerOptions) -> TlsFiles | None:
    if not options.is_grpc_tls:
        return None
    client_ca = options.grpc_root_cert if options.grpc_use_ssl_mutual else ""
    flags = ("--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert")
    return TlsFiles(options.grpc_server_cert, options.grpc_server_key, client_ca, flags)

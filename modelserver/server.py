"""The composition root: builds every object from the options, in order, and takes them down in mirrored order.

Start: the ports open first, so that liveness answers, and readiness says "not yet", while models load; a
port that is taken is found before minutes of loading. Then the models load. Stop: readiness falls and new
inference is refused, accepted requests finish while the ports stay open for the health checks, the ports
close, models are unloaded, metrics close last. All stages share the deadline of --exit-timeout-secs.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import Protocol

from modelserver.allocator import tune_malloc
from modelserver.controlplane import ControlPlane
from modelserver.dataplane import DataPlane, ServerMetadata
from modelserver.frontends.grpc.servicer import GrpcFrontend
from modelserver.frontends.http.exchange import Frontend
from modelserver.frontends.http.limits import HttpLimits
from modelserver.frontends.http.metrics import MetricsFrontend
from modelserver.frontends.http.routes import EXTENSIONS, HttpFrontend
from modelserver.options import ServerOptions, ineffective, ineffective_metrics_settings
from modelserver.repository.backend_settings import unknown_backends
from modelserver.repository.devices import gpu_ids
from modelserver.repository.options import ControlMode, DefinitionOptions, RepositoryOptions
from modelserver.repository.repository import ModelRepository
from modelserver.signals import StopSignals, unless
from modelserver.telemetry.host import HostGauges
from modelserver.telemetry.metrics import MetricsOptions, ServerMetrics
from modelserver.wire.http1.server import Http1Server
from modelserver.wire.listener import HttpOptions
from modelserver.wire.reference.grpcio_server import GrpcioOptions, GrpcioServer

logger = logging.getLogger(__name__)

# What a stage of stopping gets beyond the deadline, to let go of what it holds.
STAGE_GRACE_S = 5.0
# What stopping after a start that failed may take: nothing was promised to anyone yet.
FAILED_START_STOP_S = 1.0
_DRAIN_POLL_S = 0.005


class Wire(Protocol):
    """A listener."""

    @property
    def port(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class Server:
    """All that runs between `start` and `stop`. Made and used on one event loop."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.version = metadata.version("modelserver")
        self.repository = ModelRepository(repository_options(options))
        self.dataplane = DataPlane(
            self.repository,
            ServerMetadata(options.id, self.version, EXTENSIONS),
            strict_readiness=options.strict_readiness,
            logs_requests=options.log_verbose > 0,
        )
        self.controlplane = ControlPlane(self.repository)
        # Set when a stage of the stop overran or was forced: threads or requests may be left.
        self.is_abandoned = False
        self._wires: dict[str, Wire] = {}
        self._started: AsyncExitStack | None = None
        self._stop_deadline: float | None = None

    @property
    def http_port(self) -> int:
        return self._wires["HTTP"].port

    @property
    def grpc_port(self) -> int:
        return self._wires["gRPC"].port

    @property
    def metrics_port(self) -> int:
        return self._wires["metrics"].port

    @property
    def addresses(self) -> dict[str, str]:
        """Where each protocol is served, for people."""
        hosts = {
            "HTTP": ("http://", self.options.http_address, ""),
            "gRPC": ("", self.options.grpc_address, ""),
            "metrics": ("http://", self.options.metrics_address or self.options.http_address, "/metrics"),
        }
        found = {}
        for name, wire in self._wires.items():
            scheme, host, path = hosts[name]
            host = f"[{host}]" if ":" in host else host
            found[name] = f"{scheme}{host}:{wire.port}{path}"
        return dict(sorted(found.items()))

    async def start(self) -> None:
        """Open the ports, then load the models.

        Raises ServerError when a port cannot be had or, with --exit-on-error, a model cannot be loaded;
        what was started by then has been stopped again.
        """
        _warn_ineffective(self.options)
        for sentence in unknown_backends(repository_options(self.options).definition):
            logger.warning("%s", sentence)
        if self.options.tune_malloc:
            tune_malloc()
        async with AsyncExitStack() as stack:
            await self._open(stack, "metrics", self._metrics_wire())
            self._on_stop(stack, "models", self.repository.stop)
            await self._open(stack, "HTTP", self._http_wire())
            await self._open(stack, "gRPC", self._grpc_wire())
            await self.repository.start()
            self._on_stop(stack, "requests in flight", self._drain)
            self._started = stack.pop_all()
        addresses = ", ".join(f"{name} {address}" for name, address in self.addresses.items())
        logger.info("serving: %s", addresses)

    async def stop(self) -> None:
        """Stop what runs, in order; returns when everything is closed. Does nothing before `start` or again."""
        started, self._started = self._started, None
        if started is None:
            return
        self._stop_deadline = asyncio.get_running_loop().time() + self.options.exit_timeout_secs
        await started.aclose()
        logger.info("stopped")

    async def serve(self, announce: Callable[[Server], None]) -> int:
        """Run until SIGTERM or SIGINT; the exit status. `announce` is called once all is started.

        0 after a stop in which every accepted request was answered, also before anything was served; 1 after
        one that was forced or overran. Raises as `start` does. Main thread only.
        """
        with StopSignals() as signals:
            if not await unless(signals.stop, self.start()):
                logger.info("stopped before the start was complete")
                return 0
            # What the start made lives as long as the process: the collector need not walk it again and again.
            gc.collect()
            gc.freeze()
            announce(self)
            if not self.repository.index():
                logger.warning("no models in %s", ", ".join(self.options.model_repository))
            await signals.stop.wait()
            if not await unless(signals.force, self.stop()):
                self.is_abandoned = True
        return 1 if self.is_abandoned else 0

    def _metrics_wire(self) -> Wire | None:
        options = self.options
        if not options.allow_metrics:
            return None
        switches = options.metrics_switches
        metrics = ServerMetrics(
            self.repository.models,
            self.repository.load_counts,
            server_version=self.version,
            refusals=self.dataplane.refusals,
            host=HostGauges(options.metrics_interval_ms / 1000) if options.allow_cpu_metrics else None,
            options=MetricsOptions(
                has_duration_counters=switches["counter_latencies"],
                has_duration_histograms=switches["histogram_latencies"],
            ),
        )
        address = options.metrics_address or options.http_address
        return self._http_server(
            MetricsFrontend(metrics.collect),
            address,
            options.metrics_port,
            HttpOptions(reuse_port=options.reuse_http_port, port_flag="--metrics-port"),
        )

    def _http_wire(self) -> Wire | None:
        options = self.options
        if not options.allow_http:
            return None
        frontend = HttpFrontend(
            self.dataplane, self.controlplane, HttpLimits(max_body_bytes=options.http_max_input_size)
        )
        return self._http_server(
            frontend,
            options.http_address,
            options.http_port,
            HttpOptions(reuse_port=options.reuse_http_port, max_body_bytes=options.http_max_input_size),
        )

    def _http_server(self, frontend: Frontend, host: str, port: int, options: HttpOptions) -> Wire:
        if self.options.wire == "native":
            return Http1Server(frontend, host, port, options)
        # Imported when asked for: our own wire needs none of it.
        from modelserver.wire.reference.uvicorn_server import UvicornServer

        return UvicornServer(frontend, host, port, options)

    def _grpc_wire(self) -> Wire | None:
        options = self.options
        if not options.allow_grpc:
            return None
        frontend = GrpcFrontend(self.dataplane, self.controlplane)
        return GrpcioServer(frontend, options.grpc_address, options.grpc_port, grpcio_options(options))

    async def _open(self, stack: AsyncExitStack, name: str, wire: Wire | None) -> None:
        if wire is None:
            return
        await wire.start()
        self._wires[name] = wire
        self._on_stop(stack, name, wire.stop)

    def _on_stop(self, stack: AsyncExitStack, name: str, stop: Callable[[float], Awaitable[object]]) -> None:
        """Make `stop` a stage of stopping: it is told the seconds left and cut off a little after them."""

        async def stage() -> None:
            left_s = self._time_left_s()
            try:
                async with asyncio.timeout(left_s + STAGE_GRACE_S):
                    await stop(left_s)
            except asyncio.CancelledError:
                # Forced: the stages that follow close what they hold, and wait for nobody.
                self._stop_deadline = asyncio.get_running_loop().time()
                raise
            except TimeoutError:
                self.is_abandoned = True
                logger.error("stopping: %s took more than the %.1f s that were left; going on", name, left_s)

        stack.push_async_callback(stage)

    def _time_left_s(self) -> float:
        if self._stop_deadline is None:
            return FAILED_START_STOP_S
        return max(0.0, self._stop_deadline - asyncio.get_running_loop().time())

    async def _drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until those that were accepted are answered."""
        self.dataplane.begin_shutdown()
        for model in self.repository.models():
            model.stop()  # what waits for company in a batch has all the company it will get
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while num_inflight := sum(model.inflight for model in self.repository.models()):
            if loop.time() >= deadline:
                self.is_abandoned = True
                logger.error("stopping: %d requests were not answered within --exit-timeout-secs", num_inflight)
                return
            await asyncio.sleep(_DRAIN_POLL_S)


def repository_options(options: ServerOptions) -> RepositoryOptions:
    """The repository's part of the options."""
    return RepositoryOptions(
        roots=tuple(Path(path) for path in options.model_repository),
        control_mode=ControlMode(options.model_control_mode),
        load_models=options.load_model,
        model_name=options.model_name,
        is_exit_on_error=options.exit_on_error,
        poll_interval_s=float(options.repository_poll_secs),
        load_thread_count=options.model_load_thread_count,
        load_retry_count=options.model_load_retry_count,
        default_max_queue_size=options.max_queue_size,
        definition=DefinitionOptions(
            config_name=options.model_config_name,
            backend_directories=tuple(Path(path) for path in options.backend_directory),
            backend_config=options.backend_options,
            is_auto_complete_disabled=not options.auto_complete_config,
            allow_model_backends=options.allow_model_backends,
            gpu_ids=gpu_ids(),
        ),
    )


def grpcio_options(options: ServerOptions) -> GrpcioOptions:
    """The gRPC wire's part of the options."""
    return GrpcioOptions(
        reuse_port=options.reuse_grpc_port,
        max_receive_bytes=options.grpc_max_request_size,
        response_compression_level=options.grpc_infer_response_compression_level,
        keepalive_time_ms=options.grpc_keepalive_time,
        keepalive_timeout_ms=options.grpc_keepalive_timeout,
        keepalive_permit_without_calls=options.grpc_keepalive_permit_without_calls,
        http2_max_pings_without_data=options.grpc_http2_max_pings_without_data,
        http2_min_recv_ping_interval_without_data_ms=options.grpc_http2_min_recv_ping_interval_without_data,
        http2_max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_connection_age_ms=options.grpc_max_connection_age,
        max_connection_age_grace_ms=options.grpc_max_connection_age_grace,
    )


def _warn_ineffective(options: ServerOptions) -> None:
    flags = [option.flag_name for option in ineffective(options)]
    flags += [f"--metrics-config={key}" for key in ineffective_metrics_settings(options)]
    if flags:
        logger.warning("accepted, has no effect yet: %s", ", ".join(flags))

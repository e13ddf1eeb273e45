"""The composition root: builds every object from the options, in order, and takes them down in mirrored order.

Start: the ports open first, so that liveness answers, and readiness says "not yet", while models load; a port that is
taken is found before minutes of loading. Then the models load. Stop: readiness falls, and the server continues for
--drain-delay-secs, so that load balancers notice; the ports take no more connections and ask clients to leave; received
requests are answered; models are unloaded; metrics close last. All stages but the delay share the deadline of
--exit-timeout-secs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib import metadata
from math import inf
from pathlib import Path

from prometheus_client.core import Metric

from modelserver.api import ApiFactory
from modelserver.app.frontends import ServerFrontends
from modelserver.app.logs import log_settings
from modelserver.app.ports import GRPC, HTTP, METRICS, Wire, make_ports
from modelserver.app.server_calls import ServerCallsOfPlanes
from modelserver.app.shutdown import StopSignals, StopStages, unless
from modelserver.auth.access import is_loopback
from modelserver.auth.api_keys import open_keys
from modelserver.auth.caller_limits import NO_LIMITS
from modelserver.core.interpreter import keep_for_good, shorten_switch_interval, tune_malloc
from modelserver.core.long_work import Slices, finish
from modelserver.execution.host_policy import HostCores
from modelserver.execution.shared_resources import GpuLimits, SharedResources, open_answer_store
from modelserver.frontends.console.routes import CONSOLE
from modelserver.frontends.http.kserve import EXTENSIONS
from modelserver.options.server_options import ServerOptions
from modelserver.options.table import deprecated, ineffective, ineffective_metrics_settings
from modelserver.planes.control import ControlPlane
from modelserver.planes.data import DataPlane, ServerMetadata
from modelserver.planes.quotas import Callers
from modelserver.planes.shared_memory import SharedMemory
from modelserver.repository.options import (
    ControlMode,
    DefinitionOptions,
    DemandOptions,
    RepositoryOptions,
    gpu_ids,
    place_of,
)
from modelserver.repository.repository import ModelRepository
from modelserver.repository.roots import check_paths
from modelserver.repository.unsupported import unknown_backends
from modelserver.scheduling.rate_limit import RateLimiter
from modelserver.telemetry.gpu import GpuGauges, visible_gpus
from modelserver.telemetry.host import HostGauges
from modelserver.telemetry.log_settings import LogControl
from modelserver.telemetry.metrics import FamilySource, ServerMetrics
from modelserver.telemetry.model_families import MetricsOptions
from modelserver.telemetry.model_metrics import ModelMetricsBoard
from modelserver.telemetry.otel import OtelExport
from modelserver.telemetry.tracer import Tracer
from modelserver.telemetry.wire_counts import WireCounts, front_families, wire_families
from modelserver.wire.address import authority
from modelserver.wire.processes.server import FrontedPort

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.005


class Server:
    """Everything that runs between `start` and `stop`. Made and used on one event loop.

    `apis` are factories of HTTP APIs by name, beside those of installed packages.
    """

    def __init__(self, options: ServerOptions, apis: Mapping[str, ApiFactory] | None = None) -> None:
        self.options = options
        self._apis = dict(apis or {})
        self.version = metadata.version("modelserver-py")
        self._counts = WireCounts()
        self.keys = open_keys(options.api_keys_file, self._counts.reloads)
        self.answers = open_answer_store(options.cache_settings)
        self.limiter = RateLimiter(options.resource_limits) if options.rate_limit == "execution_count" else None
        self.repository = ModelRepository(repository_options(options), resources=self._shared_resources())
        self.callers = self._callers()
        self.dataplane = DataPlane(
            self.repository,
            ServerMetadata(options.id, self.version, _extensions(options)),
            strict_readiness=options.strict_readiness,
            tells_overload=options.overload_statuses,
            callers=self.callers,
            logs_requests=options.log_verbose > 0,
            logs_access=options.access_log,
            shared_memory=SharedMemory(is_allowed=options.allow_client_shm),
            tracer=Tracer(options.trace_options, version=self.version),
        )
        self._model_metrics = ModelMetricsBoard()
        self.controlplane = ControlPlane(
            self.repository,
            LogControl(log_settings(options)),
            self.dataplane.adapters if _may_load_adapters(options) else None,
        )
        self.controlplane.logs.follow(self.dataplane.follow_logs)
        self._stages = StopStages()
        self._wires: dict[str, Wire] = {}
        self._has_console = False
        self._started: AsyncExitStack | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether a stage of the stop overran or was forced: threads or requests may be left."""
        return self._stages.is_abandoned

    @property
    def http_port(self) -> int:
        return self._wires[HTTP].port

    @property
    def grpc_port(self) -> int:
        return self._wires[GRPC].port

    @property
    def metrics_port(self) -> int:
        return self._wires[METRICS].port

    def port_of(self, name: str) -> int:
        """The port that serves the purpose of that name in `ports`."""
        return self._wires[name].port

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each protocol, as text."""
        options = self.options
        scheme = "https" if options.tls_cert else "http"
        places = {
            GRPC: ("", options.grpc_host, ""),
            METRICS: (f"{scheme}://", options.metrics_host, "/metrics"),
        }
        found = {}
        for name, wire in self._wires.items():
            start, host, path = places.get(name, (f"{scheme}://", options.http_host, ""))
            found[name] = f"{start}{authority(host, wire.port)}{path}"
        return dict(sorted(found.items()))

    @property
    def console_address(self) -> str | None:
        """The page for browsers; None if the HTTP port has none."""
        return f"{self.addresses[HTTP]}/{CONSOLE}" if self._has_console else None

    async def start(self) -> None:
        """Open the ports, then load the models.

        Raises ServerError when a model repository is not there, a port cannot be had or, with --exit-on-error, a model
        cannot be loaded; the parts that had started are stopped again.
        """
        _warn_ineffective(self.options)
        repository = repository_options(self.options)
        check_paths(repository)  # before ports are opened, or found to be taken
        for sentence in unknown_backends(repository.definition):
            logger.warning("%s", sentence)
        if self.options.tune_malloc:
            tune_malloc()
        shorten_switch_interval()
        calls = ServerCallsOfPlanes(
            asyncio.get_running_loop(),
            self.dataplane,
            self.controlplane,
            self._model_metrics,
            has_control=self.options.model_control_mode == "explicit",
        )
        frontends = ServerFrontends(self.options, self.dataplane, self.controlplane, self.keys, self._apis)
        batches = frontends.batches
        made = frontends.make(self.metrics(() if batches is None else (batches.families,)))
        self._has_console = any(api.name == CONSOLE for api in made.http_apis)
        ports = make_ports(self.options, made, self._counts)
        async with AsyncExitStack() as stack:
            if batches is not None:
                await batches.open()
                stack.push_async_callback(batches.close)
            await self._open(stack, ports, METRICS)
            stack.callback(self.dataplane.shared_memory.close)
            export = OtelExport.of(os.environ, self.version, self._collector)
            if export is not None:
                self._stages.add(stack, "logs for OpenTelemetry", lambda _: asyncio.to_thread(export.close))
            self._stages.add(stack, "traces", lambda _: asyncio.to_thread(self.dataplane.tracer.close))
            if self.answers is not None:
                stack.push_async_callback(self.answers.close)
            self._stages.add(stack, "models", self.repository.stop)
            if export is not None:
                self._stages.add(stack, "metrics", lambda _: asyncio.to_thread(export.close_metrics))
            self._stages.add(stack, "requests in flight", self._drain)
            if self.options.listen_when_ready:
                await self.repository.start(calls)
            await self._open(stack, ports, *(name for name in (HTTP, GRPC, *ports) if name != METRICS))
            stack.callback(lambda: self.controlplane.logs.tail.close())  # whose readers would hold the ports open
            if not self.options.listen_when_ready:
                await self.repository.start(calls)
            self._stages.add(stack, "readiness", self._announce_stop)
            if batches is not None:
                self._stages.add(stack, "batches", lambda _: batches.stop())
                batches.resume()
            self._started = stack.pop_all()
        addresses = ", ".join(f"{name} {address}" for name, address in self.addresses.items())
        logger.info("serving: %s", addresses)
        if all(is_loopback(host) for host in (self.options.http_host, self.options.grpc_host)):
            logger.info("only this machine reaches these ports; --host=0.0.0.0 opens them to the network")

    async def stop(self) -> None:
        """Stop everything in order; returns when everything is closed. Does nothing before `start` or again."""
        started, self._started = self._started, None
        if started is None:
            return
        delay_s = self.options.drain_delay_secs
        self._stages.begin(delay_s + self.options.exit_timeout_secs)
        await started.aclose()
        logger.info("stopped")

    async def serve(self, announce: Callable[[Server], None]) -> int:
        """Run until SIGTERM or SIGINT; the exit status. `announce` is called once everything has started.

        0 after a stop in which every accepted request was answered, also before anything was served; 1 after
        one that was forced or overran. Raises as `start` does. Main thread only.
        """
        with StopSignals() as signals:
            if not await unless(signals.stop, self.start()):
                logger.info("stopped before the start was complete")
                return 0
            # Objects made at start live as long as the process: the collector need not walk them each time.
            keep_for_good()
            announce(self)
            if not self.repository.index():
                logger.warning(
                    "no models in %s", ", ".join((*self.options.model_repository, self.options.store)).strip(", ")
                )
            await signals.stop.wait()
            if not await unless(signals.force, self.stop()):
                self._stages.is_abandoned = True
        return 1 if self.is_abandoned else 0

    def _shared_resources(self) -> SharedResources:
        return SharedResources(
            answers=self.answers,
            limiter=self.limiter,
            cores=HostCores(self.options.host_policies),
            gpu_limits=GpuLimits(self.options.gpu_limits),
            is_fair=self.options.knows_callers,
            is_adaptive=self.options.adaptive_admission,
            summary_quantiles=self.options.summary_quantiles,
        )

    def _callers(self) -> Callers | None:
        """The quotas of callers, if any can be set."""
        defaults, keys = self.options.default_caller_limits, self.keys
        if keys is None:
            return Callers(lambda _: defaults) if self.options.knows_callers or defaults != NO_LIMITS else None
        return Callers(lambda name: keys.limits_of(name) or defaults)

    def metrics(self, sources: Sequence[FamilySource] = ()) -> ServerMetrics:
        """The contents of the metrics page, as the options set them, and what frontends count."""
        options = self.options
        switches, interval_s = options.metrics_switches, options.metrics_interval_ms / 1000
        traffic = self.repository.traffic
        on_loop: list[FamilySource] = []
        if self.limiter is not None:
            on_loop.append(self.limiter.families)
        if self.callers is not None:
            on_loop.append(self.callers.counts.families)
        on_loop.append(self.repository.on_demand.families)
        on_loop.append(partial(traffic.counts.families, traffic.weights))
        on_loop.append(self.dataplane.refusals.families)
        if options.wire == "native":
            on_loop.append(partial(wire_families, self._counts))
        on_loop += [self._front_families, self._counts.reloads.families, *sources]
        off_loop: list[FamilySource] = []
        if options.allow_cpu_metrics:
            off_loop.append(HostGauges(interval_s).families)
        if options.allow_gpu_metrics:
            off_loop.append(GpuGauges(interval_s).families)
        return ServerMetrics(
            self.repository.models,
            self.repository.load_counts,
            server_version=self.version,
            on_loop=on_loop,
            off_loop=off_loop,
            answers=self.answers.counts if self.answers is not None else None,
            model_metrics=self._model_metrics,
            options=MetricsOptions(
                has_duration_counters=switches["counter_latencies"],
                has_duration_histograms=switches["histogram_latencies"],
            ),
        )

    def _collector(self) -> Callable[[], list[Metric]]:
        """What makes the families of the page of metrics in a thread; what only the event loop knows is read there."""
        metrics, loop = self.metrics(), asyncio.get_running_loop()

        async def begin() -> Slices[list[Metric]]:
            slices = metrics.collect_slices()
            next(slices)
            return slices

        return lambda: finish(asyncio.run_coroutine_threadsafe(begin(), loop).result())

    def _front_families(self) -> list[Metric]:
        """The families of the wire's processes, if it has any."""
        processes = {wire.processes for wire in self._wires.values() if isinstance(wire, FrontedPort)}
        return front_families([gauges for each in processes for gauges in each.gauges()])

    async def _open(self, stack: AsyncExitStack, ports: Mapping[str, Wire], *names: str) -> None:
        """Listen on those of these ports that exist; they stop together, each with the whole grace period."""
        named = [(name, ports[name]) for name in dict.fromkeys(names) if name in ports]
        if not named:
            return
        wires = {id(wire): wire for _, wire in named}.values()

        async def stop(grace_s: float) -> None:
            late = asyncio.get_running_loop().call_later(grace_s, self._count_unanswered)
            try:
                await asyncio.gather(*(wire.stop(grace_s) for wire in wires))
            finally:
                late.cancel()

        self._stages.add(stack, " and ".join(name for name, _ in named), stop)
        for wire in wires:
            await wire.start()
        self._wires.update(named)

    async def _announce_stop(self, timeout_s: float) -> None:
        """Readiness falls; continue for the delay, so that it is noticed, and until the sequences have ended."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        self.dataplane.begin_drain()
        for wire in self._wires.values():
            wire.retire()
        self._log_inflight()
        if self.options.drain_delay_secs:
            logger.info("no longer ready; serving for another %g s", self.options.drain_delay_secs)
            await asyncio.sleep(self.options.drain_delay_secs)
        # Batches that wait for more requests will get none.
        for model in self.repository.models():
            model.hurry()
        self.dataplane.end_sequences()
        num_sequences = await self._until_zero(self._num_sequences, deadline_s)
        if num_sequences:
            logger.warning("stopping: %d sequences did not end within --exit-timeout-secs", num_sequences)

    async def _drain(self, timeout_s: float) -> None:
        """The ports are closed: wait for requests in flight, and refuse new ones between models."""
        self.dataplane.begin_shutdown()
        for model in self.repository.models():
            model.stop()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        if await self._until_zero(self._num_inflight, deadline_s):
            self._count_unanswered()

    async def _until_zero(self, count: Callable[[], int], deadline_s: float) -> int:
        """Wait until `count` gives 0 or the deadline passes; returns the last count."""
        loop = asyncio.get_running_loop()
        while (num_left := count()) and loop.time() < deadline_s:  # noqa: ASYNC110 - counts have no waiters
            await asyncio.sleep(_DRAIN_POLL_S)
        return num_left

    def _log_inflight(self) -> None:
        """Log what the server waits for before it stops, in Triton's sentences."""
        waiting = [model for model in self.repository.models() if model.inflight]
        if waiting:
            logger.info("Found %d model versions that have in-flight inferences", len(waiting))
        for model in waiting:
            logger.info(
                "Model '%s' (version %d) has %d in-flight inferences", model.name, model.version, model.inflight
            )

    def _num_inflight(self) -> int:
        return sum(model.inflight for model in self.repository.models())

    def _num_sequences(self) -> int:
        return sum(model.num_sequences for model in self.repository.models())

    def _count_unanswered(self) -> None:
        """The time is over: log once how many requests are unanswered."""
        num_inflight = self._num_inflight()
        if num_inflight and not self.is_abandoned:
            self._stages.is_abandoned = True
            logger.error("stopping: %d requests were not answered within --exit-timeout-secs", num_inflight)


def _extensions(options: ServerOptions) -> tuple[str, ...]:
    """The protocol extensions that these options enable."""
    absent = set() if options.allow_client_shm else {"system_shared_memory", "cuda_shared_memory"}
    if not visible_gpus():
        absent.add("cuda_shared_memory")
    return tuple(name for name in EXTENSIONS if name not in absent)


def _warn_ineffective(options: ServerOptions) -> None:
    flags = [option.flag_name for option in ineffective(options)]
    flags += [f"--metrics-config={key}" for key in ineffective_metrics_settings(options)]
    if flags:
        logger.warning("accepted, has no effect yet: %s", ", ".join(flags))
    for option in deprecated(options):
        successor = option.flag.help.removeprefix("As ").removesuffix(".")
        logger.warning("Warning: '%s' has been deprecated! Please use '%s' instead", option.flag_name, successor)
    if options.grpc_server_cert and not options.is_grpc_tls:
        logger.warning("--grpc-server-cert has no effect without --grpc-use-ssl: the gRPC port does not use TLS")


def _may_load_adapters(options: ServerOptions) -> bool:
    """By our flag, or vLLM's variable."""
    asked = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower()
    return options.allow_runtime_lora_updating or asked in ("1", "true")


def repository_options(options: ServerOptions) -> RepositoryOptions:
    """The repository's part of the options."""
    roots = map(place_of, options.model_repository)
    # A repository that is given twice counts once, as in Triton.
    places = {root if isinstance(root, Path) else root.text: root for root in roots}
    return RepositoryOptions(
        roots=tuple(places.values()),
        control_mode=ControlMode(options.model_control_mode),
        load_models=options.load_model,
        model_name=options.model_name,
        is_exit_on_error=options.exit_on_error,
        poll_interval_s=float(options.repository_poll_secs),
        load_thread_count=options.model_load_thread_count,
        load_retry_count=options.model_load_retry_count,
        unload_grace_s=options.unload_grace_secs,
        default_max_queue_size=options.max_queue_size,
        cloud_cache_directory=Path(options.cloud_cache_directory) if options.cloud_cache_directory else None,
        cloud_cache_bytes=options.cloud_cache_byte_size,
        has_namespaces=options.model_namespacing,
        store=Path(options.store).expanduser() if options.store else None,
        demand=DemandOptions(
            is_on=options.load_on_demand,
            keep_alive_s=inf if options.model_keep_alive_secs < 0 else float(options.model_keep_alive_secs),
            budget_bytes=options.on_demand_memory_budget,
        ),
        override_directory=Path(options.override_directory) if options.override_directory else None,
        definition=DefinitionOptions(
            config_name=options.model_config_name,
            backend_directories=tuple(Path(path) for path in options.backend_directory),
            backend_config=_backend_config(options),
            is_auto_complete_disabled=not options.auto_complete_config,
            allow_model_backends=options.allow_model_backends,
            agent_directory=Path(options.repoagent_directory) if options.repoagent_directory else None,
            limits=options.limits_of_configs,
            gpu_ids=gpu_ids(options.min_supported_compute_capability),
        ),
    )


def _backend_config(options: ServerOptions) -> dict[str, dict[str, str]]:
    """The settings of backends, with the common ones that have flags of their own."""
    settings = options.backend_options
    common = {
        "execute-timeout-seconds": str(options.execute_timeout_secs),
        "output-lines-per-second": str(options.model_output_lines_per_sec),
        **({"nnodes": str(options.nnodes), "leader": "{}:{}".format(*options.leader)} if options.nnodes > 1 else {}),
        **settings.get("", {}),
    }
    return {**settings, "": common}

"""A running router: ports, replicas, and where they come from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from importlib import metadata

from prometheus_client.core import Metric

from modelserver.app.ports import GRPC, HTTP, METRICS, Frontends, OwnPort, Wire, make_ports, own_address
from modelserver.app.shutdown import StopSignals, unless
from modelserver.auth.access import Access
from modelserver.auth.guard import Guard
from modelserver.client.address import Tls
from modelserver.core.interpreter import keep_for_good, tune_malloc
from modelserver.core.long_work import Slices
from modelserver.endpoints.choice import Policy
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.endpoints.membership import Membership, Source, StaticSource, parse_source
from modelserver.endpoints.probes import Prober
from modelserver.frontends.http.access_log import with_access_log
from modelserver.frontends.http.cors import with_cors
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.metrics import Metrics
from modelserver.options.router_options import RouterOptions
from modelserver.router.frontend import RouterCalls, RouterFrontend
from modelserver.router.measures import router_families
from modelserver.router.probing import open_lines, probe
from modelserver.router.replicas import Replicas, RoutingRules, check_address
from modelserver.telemetry.wire_counts import WireCounts, wire_families
from modelserver.wire.address import authority

logger = logging.getLogger(__name__)

_FIRST_LOOK_S = 2.0


class Router:
    """Everything between `start` and `stop`. Made and used on one event loop."""

    def __init__(self, options: RouterOptions) -> None:
        """Raises InvalidArgumentError for replicas that cannot be."""
        self.options = options
        routing, server = options.routing, options.server
        for address in routing.addresses:
            check_address(address)
        self._source: Source = (
            parse_source(routing.discover, open_lines=lambda url: open_lines(self.replicas, url), scheme="http")
            if routing.discover
            else StaticSource(routing.addresses)
        )
        self._counts = WireCounts()
        self.endpoints = EndpointSet(policy=Policy(routing.balance))
        self.membership = Membership(self.endpoints, self._source)
        rules = RoutingRules(
            affinity=routing.affinity,
            max_wait_s=routing.wait_for_replica_secs,
            max_waiting=routing.max_waiting,
            logs_access=server.access_log,
            tls=Tls(routing.replica_ca, routing.replica_cert, routing.replica_key),
        )
        self.replicas = Replicas(self.endpoints, rules)
        self._prober = Prober(self.endpoints, lambda endpoint: probe(self.replicas, endpoint))
        self._tasks: list[asyncio.Task[None]] = []
        self._wires: dict[str, Wire] = {}

    @property
    def http_port(self) -> int:
        return self._wires[HTTP].port

    @property
    def grpc_port(self) -> int:
        return self._wires[GRPC].port

    @property
    def metrics_port(self) -> int:
        return self._wires[METRICS].port

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each port, as text."""
        server = self.options.server
        scheme = "https" if server.tls_cert else "http"
        places = {
            HTTP: f"{scheme}://{{}}",
            GRPC: "{}",
            METRICS: f"{scheme}://{{}}/metrics",
        }
        hosts = {HTTP: server.http_host, GRPC: server.grpc_host, METRICS: server.metrics_host}
        return {name: places[name].format(authority(hosts[name], wire.port)) for name, wire in self._wires.items()}

    async def start(self) -> None:
        """Look for the replicas and open the ports. Raises ServerError when a port cannot be had."""
        server = self.options.server
        if server.tune_malloc:
            tune_malloc()
        self.replicas.start()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.membership.run(), name="membership"),
            loop.create_task(self._prober.run(), name="probes"),
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_S):
                await self.membership.is_known.wait()
        if self.membership.problem:
            logger.warning("the replicas are not known yet: %s", self.membership.problem)
        try:
            for name, wire in self._make_ports().items():
                if wire not in self._wires.values():
                    await wire.start()
                self._wires[name] = wire
        except BaseException:
            await self._stop(0.0)
            raise
        logger.info("routing to %d replicas: %s", len(self.endpoints), self.addresses)

    async def stop(self) -> None:
        """Take no more requests, finish those in flight, and close."""
        server = self.options.server
        for wire in set(self._wires.values()):
            wire.retire()
        self.replicas.is_stopping = True
        if server.drain_delay_secs:
            await asyncio.sleep(server.drain_delay_secs)
        await self._stop(float(server.exit_timeout_secs))
        logger.info("stopped")

    async def _stop(self, grace_s: float) -> None:
        wires = set(self._wires.values())
        await asyncio.gather(*(wire.stop(grace_s) for wire in wires))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replicas.stop()

    async def serve(self, announce: Callable[[Router], None]) -> int:
        """Run until SIGTERM or SIGINT; the exit status. Raises as `start` does. Main thread only."""
        with StopSignals() as signals:
            if not await unless(signals.stop, self.start()):
                return 0
            keep_for_good()
            announce(self)
            await signals.stop.wait()
            return 0 if await unless(signals.force, self.stop()) else 1

    def _make_ports(self) -> dict[str, Wire]:
        server = self.options.server
        page = Metrics(self._collect)
        own = {}
        if server.allow_metrics:
            api = page.api(server.metrics_port)
            own[METRICS] = OwnPort(HttpFrontend([api], Guard(Access(), None)), own_address(server, api))
        http = with_access_log(RouterFrontend(self.replicas, page.answer), is_logged=server.access_log)
        frontends = Frontends(
            dataplane=None,
            http=with_cors(http, server.http_cors) if server.allow_http else None,
            grpc=RouterCalls(self.replicas) if server.allow_grpc else None,
            own=own,
        )
        return make_ports(server, frontends, self._counts)

    def _collect(self) -> Slices[list[Metric]]:
        families: Iterable[Metric] = [
            *router_families(self.replicas, self.membership, metadata.version("modelserver-py")),
            *wire_families(self._counts),
        ]
        yield
        return list(families)

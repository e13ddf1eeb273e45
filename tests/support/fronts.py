"""Both sides of the hop between a front and the core, in one process and on one loop: no sockets, no child process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from support.echo import EchoControlPlane, EchoModel, echo_dataplane

from modelserver.app.frontends import grpc_frontend, http_frontend
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.processes.front_frontends import Core
from modelserver.wire.processes.session import FrontSession
from modelserver.wire.processes.setup import CorePlanes, FrontCalls, FrontSockets


class Hop:
    """`core` is what a front's connections call, `session` what answers them; `local` are the core's own frontends."""

    def __init__(self, http: Any, grpc: Any, dataplane: Any, calls: FrontCalls) -> None:
        self.local = CorePlanes(dataplane, http, grpc)
        self.graces: list[float] = []
        self.lost: list[FrontSession] = []
        self.counts = WireCounts()
        sockets = FrontSockets("front")
        link, handover, outgoing, incoming = map(os.dup, sockets.descriptors)
        os.close(handover)
        sockets.close_theirs()
        self.session = FrontSession("front", sockets, self.local, counts=[self.counts], lost=self.lost.append)
        self.core = Core((link, outgoing, incoming), HttpLimits(), GrpcLimits(), calls, drain=self.graces.append)

    @property
    def is_idle(self) -> bool:
        """Whether neither side waits for anything of the other."""
        return not self.core.num_inflight and not self.session.num_inflight

    def close(self) -> None:
        self.core.link.close()
        self.session.close()


@asynccontextmanager
async def hop(
    *models: EchoModel, control: EchoControlPlane | None = None, http: Any = None, grpc: Any = None
) -> AsyncIterator[Hop]:
    """A hop to a data plane over `models`; at the end nothing is left on its way."""
    dataplane = echo_dataplane(*models)
    planes: Any = control or EchoControlPlane()
    all_http = http_frontend(dataplane, planes)
    all_grpc = grpc_frontend(dataplane, planes, health_watch_interval_s=0.01)
    calls = CorePlanes(dataplane, all_http, all_grpc, all_http.apis).calls()
    made = Hop(http or all_http, grpc or all_grpc, dataplane, calls)
    try:
        yield made
        await until(lambda: made.is_idle)
    finally:
        made.close()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let the loop run until `condition` is true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions are the other side's
            await asyncio.sleep(0.001)

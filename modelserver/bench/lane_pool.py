"""The lanes of a load process: connections of HTTP/1.1, or calls spread over shared connections of HTTP/2."""

from __future__ import annotations

import asyncio

from modelserver.bench.work import Transport, Work
from modelserver.client.grpc_lane import GrpcLane, StreamLane
from modelserver.client.h2_connection import H2Connection
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Answers, Lane
from modelserver.errors import UnavailableError

# Connections that are opened at the same time: a server's backlog is finite.
MAX_OPENING = 64
# For streams to end.
FINISH_TIMEOUT_S = 1.0


class LanePool(Answers):
    """Opens lanes, keeps them from load to load, and passes their answers to the current load."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lanes: list[Lane] = []
        self._connections: list[H2Connection] = []
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._growing = asyncio.Lock()

    async def take(self, num_lanes: int, answers: Answers) -> list[Lane]:
        """The given number of free lanes, whose answers go to `answers`. Raises UnavailableError."""
        missing = num_lanes - len(self._lanes)
        if missing > 0:
            if self._work.transport is Transport.HTTP:
                await asyncio.gather(*(self._add_http() for _ in range(missing)))
            else:
                while len(self._lanes) < num_lanes:
                    await self._add_connection()
        taken = self._lanes[:num_lanes]
        for index, lane in enumerate(taken):
            lane.answers = answers
            lane.index = index
            lane.due_ns = 0
        return taken

    async def grow(self, index: int, answers: Answers) -> Lane:
        """One more lane than those taken; the `index`-th. Raises UnavailableError."""
        async with self._growing:
            while len(self._lanes) <= index:
                await (self._add_http() if self._work.transport is Transport.HTTP else self._add_connection())
        lane = self._lanes[index]
        lane.answers = answers
        lane.index = index
        return lane

    async def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*(connection.finish(FINISH_TIMEOUT_S) for connection in self._connections))
        self._lanes.clear()
        self._connections.clear()

    async def _add_http(self) -> None:
        lane = HttpLane(self._work.address, self)
        async with self._opening:
            await lane.connect()
        self._lanes.append(lane)

    async def _add_connection(self) -> None:
        """A connection and the lanes that share it."""
        work = self._work
        connection = H2Connection(work.address, work.fields, frame_bytes=work.frame_bytes)
        await connection.connect()
        self._connections.append(connection)
        num_lanes = min(work.lanes_per_connection, connection.max_streams)
        if num_lanes < 1:
            raise UnavailableError(f"{work.address} allows no streams")
        lane: Lane
        for _ in range(num_lanes):
            if work.transport is Transport.STREAM:
                lane = StreamLane(connection, self, is_decoupled=work.is_decoupled, algorithm=work.algorithm)
            else:
                lane = GrpcLane(connection, self)
            self._lanes.append(lane)

    # Lanes without a load have no answers.

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        """An answer after its load has ended."""

    def responded(self, lane: Lane) -> None:
        """A response after its load has ended."""

"""Supervises the server of one replica: in an actor of Ray's, but without knowing Ray.

A thread of the host starts the server, reads its ports, asks whether it is ready and how busy it is, and stops it. The
kernel kills the server when that thread or this process ends, so that no server outlives its host.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from modelserver.client.server_client import ServerClient
from modelserver.client.server_process import ServerProcess
from modelserver.cluster.demand import PENDING
from modelserver.cluster.deployment import Pool, RouterPool
from modelserver.cluster.planner import ReplicaState
from modelserver.errors import ServerError, UnavailableError

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.25
_ASK_TIMEOUT_S: Final = 2.0
_NUM_FAILED_ASKS: Final = 3
_INFLIGHT: Final = re.compile(rb"^modelserver_inflight_requests (\S+)", re.MULTILINE)
_NUM_LINES: Final = 5
# Seconds until a node that has ended is started again.
_FOLLOWER_PAUSE_S: Final = 1.0
_GROUP_PORTS: Final = range(20_000, 30_000)
# The server goes on for as long after the request to drain, so that routers learn of it first.
_DRAIN_DELAY_S: Final = 2


class Report(msgspec.Struct, frozen=True):
    """What a host tells of its replica. `address` is HOST:PORT once the server has printed it; `problem` says how the
    server ended, with its last lines."""

    replica: str
    pool: Pool
    node: str
    state: ReplicaState
    address: str = ""
    pid: int = 0
    ongoing: int = 0
    problem: str = ""
    # Of the server, since the host began: a report of an earlier one is out of date.
    num_starts: int = 1


class Group(msgspec.Struct, frozen=True):
    """Where the nodes of a replica meet, and the key by which they know each other."""

    address: str
    port: int
    key: str

    def words(self, pool: Pool, node: int) -> list[str]:
        """The arguments of `modelserver serve` on one of the nodes."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return [
            *(f"--nnodes={pool.resources.nodes}", f"--node-rank={node}"),
            *(f"--master-addr={address}", f"--master-port={self.port}"),
        ]


@dataclass(frozen=True, slots=True)
class _Order:
    """`drains` ends the server for good; otherwise it is started once more."""

    drains: bool


class ReplicaHost:
    """Starts the server at once; all methods return at once and may be called from any thread."""

    def __init__(self, replica: str, pool: Pool, *, host: str, node: str, key: str = "") -> None:
        """`host` is the address to listen at, `node` the name of the machine for people; `key` is for replicas of
        several nodes."""
        self._replica, self._pool, self._host, self._node = replica, pool, host, node
        self._group = Group(host, _free_port(host), key) if pool.resources.nodes > 1 else None
        self._num_starts = 1
        self._report = Report(replica, pool, node, ReplicaState.STARTING)
        self._server: ServerProcess | None = None
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="replica-host", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        return self._report

    def group(self) -> Group | None:
        """What the other nodes of the replica must know; None: there are none."""
        return self._group

    def restart(self) -> None:
        """Start the server again after it failed; nothing happens while it runs."""
        if self._report.state is ReplicaState.FAILED:
            self._num_starts += 1
            self._say(ReplicaState.STARTING)
            self._orders.put(_Order(drains=False))

    def drain(self) -> None:
        """Have the server finish what it has, and end."""
        if self._report.state is not ReplicaState.STOPPED:
            self._orders.put(_Order(drains=True))

    def log_lines(self, num_lines: int) -> list[str]:
        """The newest lines of the server's output, also after its end."""
        return self._server.tail(num_lines) if self._server is not None else []

    # The thread.

    def _run(self) -> None:
        try:
            while self._serve() and not self._orders.get().drains:
                pass
            self._say(ReplicaState.STOPPED)
        except Exception as error:  # the top of the thread
            logger.exception("the host of %s ends", self._replica)
            self._say(ReplicaState.FAILED, problem=f"the host of the replica failed: {error}")
            while not self._orders.get().drains:
                pass
            self._say(ReplicaState.STOPPED)

    def _serve(self) -> bool:
        """Run the server until it ends; False when it was drained."""
        words = [
            *(f"--host={self._host}", f"--drain-delay-secs={_DRAIN_DELAY_S}", *self._pool.words),
            *(self._group.words(self._pool, 0) if self._group is not None else []),
        ]
        environment = _environment(self._pool, self._group)
        server = self._server = ServerProcess(words, command=self._pool.command, environment=environment, on_line=_echo)
        timeout_s = self._pool.rollout.start_timeout_s
        started_s, num_failed_asks = time.monotonic(), 0
        while server.poll() is None:
            if self._is_told_to_drain():
                self._drain(server)
                return False
            state = self._ask(server)
            if state is ReplicaState.READY:
                num_failed_asks = 0
            elif self._report.state is ReplicaState.READY:
                num_failed_asks += 1
                if num_failed_asks >= _NUM_FAILED_ASKS:
                    self._say(ReplicaState.STARTING, server)
                    started_s, num_failed_asks = time.monotonic(), 0
            elif time.monotonic() - started_s > timeout_s:
                server.kill()
                self._fail(server, f"the server was not ready within {timeout_s:g} s")
                return True
            time.sleep(INTERVAL_S)
        self._fail(server, f"the server ended with status {server.poll()}")
        return True

    def _is_told_to_drain(self) -> bool:
        try:
            return self._orders.get_nowait().drains
        except queue.Empty:
            return False

    def _drain(self, server: ServerProcess) -> None:
        self._say(ReplicaState.DRAINING, server)
        server.stop(self._pool.rollout.drain_timeout_s)

    def _ask(self, server: ServerProcess) -> ReplicaState:
        """Ask the server, and report what it says."""
        address = server.addresses.get("http", "")
        if not address:
            return ReplicaState.STARTING
        client = ServerClient(f"http://{address}", timeout_s=_ASK_TIMEOUT_S)
        is_router = isinstance(self._pool, RouterPool)
        try:
            # A router may have no replica, and requests that wait for the first one.
            client.check_live() if is_router else client.check_ready()
        except ServerError:
            return ReplicaState.STARTING
        found = None
        with suppress(ServerError):  # it may want an API key
            found = (PENDING if is_router else _INFLIGHT).search(
                client.metrics("/metrics" if is_router else "/metrics/load")
            )
        self._say(ReplicaState.READY, server, ongoing=int(float(found[1])) if found else 0)
        return ReplicaState.READY

    def _fail(self, server: ServerProcess, problem: str) -> None:
        server.close()
        self._say(ReplicaState.FAILED, problem="\n".join([problem, *server.tail(_NUM_LINES)]))

    def _say(
        self, state: ReplicaState, server: ServerProcess | None = None, *, ongoing: int = 0, problem: str = ""
    ) -> None:
        self._report = Report(
            self._replica,
            self._pool,
            self._node,
            state,
            address=self._reachable(server.addresses.get("http", "")) if server is not None else "",
            pid=server.pid if server is not None else 0,
            ongoing=ongoing,
            problem=problem,
            num_starts=self._num_starts,
        )

    def _reachable(self, address: str) -> str:
        """An address at which other nodes reach the server, which may listen at all of this node's."""
        host, _, port = address.rpartition(":")
        if host not in ("0.0.0.0", "[::]"):  # noqa: S104 - compared only
            return address
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"


class FollowerHost:
    """Keeps a further node of a replica at its work until this process ends; knows no requests."""

    def __init__(self, pool: Pool, node: int, group: Group) -> None:
        self._pool, self._node, self._group = pool, node, group
        self._thread = threading.Thread(target=self._run, name="follower-host", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            words = self._group.words(self._pool, self._node)
            environment = _environment(self._pool, self._group)
            ServerProcess(words, environment=environment, on_line=_echo).close()
            time.sleep(_FOLLOWER_PAUSE_S)


def _environment(pool: Pool, group: Group | None) -> dict[str, str]:
    environment = {**os.environ, **pool.env}
    if not pool.resources.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs from owners of some only
    if group is not None:
        environment["MODELSERVER_GROUP_KEY"] = group.key
    return environment


def _free_port(host: str) -> int:
    """One outside the range from which the system chooses ports, so that it is free again after a restart."""
    for port in random.sample(_GROUP_PORTS, len(_GROUP_PORTS)):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise UnavailableError(f"no port from {_GROUP_PORTS[0]} to {_GROUP_PORTS[-1]} of {host} is free")


def _echo(line: str) -> None:
    """Into the log of the actor, where Ray's own tools find it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

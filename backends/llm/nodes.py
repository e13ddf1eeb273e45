"""Ranks of one network on several machines: how they meet, and the program that starts them on all but the first.

    leader (node 0, the engine)                     follower (node 1, 2, …)
    listens while it loads            <── node ──   connects, again and again until the leader takes it
                                      ── ranks ──>  starts a process for each of its ranks
    has a connection to every rank    <── rank ──   each of them connects, and follows as `tensor_parallel` says

No message runs code: they are JSON, and numbers behind it (`rank_messages`). A leader names the checkpoint that its
ranks read. With a key in the variable `MODELSERVER_GROUP_KEY` of all nodes both ends prove to each other that they
know it. Nothing that they exchange is encrypted: the network between the nodes must be private.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from modelserver.backend import BackendContext, InvalidArgumentError, UnavailableError

logger = logging.getLogger(__name__)

# The module of the processes of ranks.
RANK_MODULE = f"{__package__}.rank_process"
# Settings of the backend that the server makes of its flags.
NNODES, LEADER = "nnodes", "leader"
_KEY_VARIABLE = "MODELSERVER_GROUP_KEY"
_USUAL_START_S = 300.0
_TELL_S = 30.0
# In all: a peer that says its words slowly, or none, keeps no other one waiting.
_GREET_S = 10.0
_MOST_GREETED = 64
# Of a message to the leader, and of a greeting.
MOST_BYTES = 1 << 16
_RETRY_S = 0.5
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1
# Seconds without an answer of a machine's kernel after which the machine counts as lost.
_SILENCE_S = 10


@dataclass(frozen=True, slots=True)
class Nodes:
    """`count` machines share the ranks of a network evenly. The leader listens at `host` and `port` while they meet,
    which may take `patience_s`."""

    count: int
    host: str
    port: int
    patience_s: float = 0.8 * _USUAL_START_S

    @classmethod
    def of(cls, context: BackendContext) -> Nodes | None:
        """Those of the server's flags; None: there is one machine."""
        count = int(context.options.get(NNODES, "1"))
        host, _, port = context.options.get(LEADER, "").rpartition(":")
        # The rest of the time that the process of the instance has is for the weights.
        patience_s = 0.8 * context.float_parameter("START_TIMEOUT_SECONDS", _USUAL_START_S)
        return cls(count, host.strip("[]"), int(port), patience_s) if count > 1 else None

    def num_local(self, num_ranks: int) -> int:
        """How many ranks each machine has. Raises InvalidArgumentError if they cannot be shared."""
        if num_ranks % self.count:
            raise InvalidArgumentError(
                f"tensor_parallel_size {num_ranks} cannot be shared by {self.count} nodes (--nnodes): "
                "make it a multiple"
            )
        return num_ranks // self.count


class Meeting:
    """The leader's end, while the other nodes and their ranks connect."""

    def __init__(self, nodes: Nodes, num_ranks: int) -> None:
        self._nodes = nodes
        self._num_local = nodes.num_local(num_ranks)
        self._num_ranks = num_ranks
        self._key = _key()
        self._token = secrets.token_hex(8)
        # Nodes that wait to be told their ranks; None: they have been told.
        self._waiting: dict[int, Connection | None] = {}
        self._found: dict[int, Connection] = {}
        # Of these three; connections are greeted in a thread each.
        self._lock = threading.Lock()
        self._is_over = False
        self._room = threading.BoundedSemaphore(_MOST_GREETED)
        self._version_of_others = ""
        # The address at which the others reach this machine.
        self.address = nodes.host

    def gather(self) -> dict[int, Connection]:
        """The connections to the ranks of the other nodes, by rank.

        Raises UnavailableError that names the nodes that did not come in time.
        """
        deadline_s = time.monotonic() + self._nodes.patience_s
        told_s = time.monotonic()
        with ExitStack() as failed:
            failed.callback(self._hang_up)
            listener = self._listen(deadline_s)
            try:
                while not self._is_complete():
                    now_s = time.monotonic()
                    if now_s > deadline_s:
                        raise UnavailableError(f"{self._missing()} within {self._nodes.patience_s:.0f} s")
                    if now_s - told_s > _TELL_S:
                        told_s = now_s
                        logger.info("%s yet", self._missing())
                    with suppress(TimeoutError, ConnectionError):
                        self._begin(listener.accept()[0])
            finally:
                listener.close()
                with self._lock:
                    self._is_over = True
                for pipe in self._waiting.values():
                    if pipe is not None:
                        pipe.close()
            failed.pop_all()
        return self._found

    def _is_complete(self) -> bool:
        with self._lock:
            return len(self._found) == self._num_ranks - self._num_local

    def _hang_up(self) -> None:
        for pipe in self._found.values():
            pipe.close()

    def _listen(self, deadline_s: float) -> socket.socket:
        """A name may be known, and the port free, a little later: another model may meet its ranks now."""
        host, port = self._nodes.host, self._nodes.port
        while True:
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                listener = socket.create_server(address[:2], family=family, backlog=64)
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise UnavailableError(
                        f"cannot listen for the other nodes at {host}:{port}, an address of this machine "
                        f"(--master-addr): {error}"
                    ) from None
                time.sleep(_RETRY_S)
            else:
                listener.settimeout(_POLL_S)
                return listener

    def _missing(self) -> str:
        nodes = [node for node in range(1, self._nodes.count) if node not in self._waiting]
        ranks = [rank for rank in range(self._num_local, self._num_ranks) if rank not in self._found]
        who = f"nodes {nodes} of {self._nodes.count} have" if nodes else f"ranks {ranks} of the other nodes have"
        found = self._version_of_others
        why = f" (one came with version {found}; this is {_version()})" if found else ""
        return f"{who} not joined at {self._nodes.host}:{self._nodes.port}{why}"

    def _begin(self, connected: socket.socket) -> None:
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._greet, args=(connected,), name="greet-node", daemon=True).start()
        else:
            connected.close()

    def _greet(self, connected: socket.socket) -> None:
        """Take a connection of a node or a rank. Strangers, and nodes that come too often, are sent away."""
        pipe: Connection | None = None
        is_known = False
        try:
            local = str(connected.getsockname()[0])
            pipe = _pipe_of(connected)
            with _hurry(pipe):
                if self._key:
                    deliver_challenge(pipe, self._key)
                    answer_challenge(pipe, self._key)
                who = json.loads(pipe.recv_bytes(MOST_BYTES))
            with self._lock:
                is_known = not self._is_over and self._place(who, pipe)
                if is_known:
                    self.address = local
                    if len(self._waiting) == self._nodes.count - 1:
                        self._tell()
        except Exception as error:
            logger.warning("a connection to the port of the ranks is refused: %s: %s", type(error).__name__, error)
        finally:
            self._room.release()
            if not is_known:
                (connected if pipe is None else pipe).close()

    def _place(self, who: dict[str, Any], pipe: Connection) -> bool:
        if who["version"] != _version():
            self._version_of_others = f"{who['version']!s:.40}"
            raise ValueError(
                f"its version is {self._version_of_others}, and this node's {_version()}: install the same on all"
            )
        if "rank" in who:
            rank = int(who["rank"])
            is_known = who["token"] == self._token and self._num_local <= rank < self._num_ranks
            if is_known and rank not in self._found:
                self._found[rank] = pipe
                return True
            return False
        node, told = int(who["node"]), self._waiting.get(int(who["node"]))
        if not 0 < node < self._nodes.count or (node in self._waiting and told is None):
            return False
        if told is not None:  # it was started again
            told.close()
        self._waiting[node] = pipe
        return True

    def _tell(self) -> None:
        for node, pipe in self._waiting.items():
            if pipe is not None:
                ranks = [node * self._num_local + index for index in range(self._num_local)]
                with suppress(OSError):
                    pipe.send_bytes(json.dumps({"ranks": ranks, "token": self._token}).encode())
                pipe.close()
                self._waiting[node] = None


def connect_rank(host: str, port: int, rank: int, token: str) -> Connection:
    """A rank's connection to the leader. Raises OSError."""
    return _connect(host, port, {"rank": rank, "token": token})


def local_address(pipe: Connection) -> str:
    """At which the other end reaches this machine."""
    with _socket_of(pipe) as connected:
        return str(connected.getsockname()[0])


def shut(pipe: Connection) -> None:
    """End the connection at both ends, also for threads that wait for it; it is still to be closed."""
    with suppress(OSError), _socket_of(pipe) as connected:
        _shut(connected)


def ended(pipes: Sequence[Connection]) -> Callable[[float | None], list[int]]:
    """A function that waits for the given seconds, or without a limit, for the other end of a pipe to close or vanish.

    It returns the indices of those pipes.
    """
    poll = select.poll()
    numbers = [pipe.fileno() for pipe in pipes]
    for number in numbers:
        poll.register(number, select.POLLRDHUP)
    return lambda wait_s: [numbers.index(n) for n, _ in poll.poll(None if wait_s is None else 1000 * wait_s)]


def watch(pipes: Sequence[Connection], on_lost: Callable[[int], None]) -> None:
    """Call `on_lost`, in another thread, with the index of the first pipe whose other end has closed or vanished."""
    wait = ended(pipes)
    threading.Thread(target=lambda: on_lost(wait(None)[0]), name="rank-watch", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent`, which started it, ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class FollowerNode:
    """The program of a node that is not the leader: joins it for each of its models that has several ranks."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        self._nodes, self._node = nodes, node
        self._is_stopping = False
        self._complaint = ""
        self._ranks: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        """Until SIGTERM or SIGINT, and then until the leader has ended: it may have requests to finish."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        logger.info("node %d of %d waits for its leader at %s:%d", self._node, *(self._nodes.count, *self._place()))
        while self._ranks or not self._is_stopping:
            told = None if self._is_stopping else self._join()
            if told is not None:
                self._start(told["ranks"], told["token"])
            self._reap()
            time.sleep(_POLL_S)

    def _place(self) -> tuple[str, int]:
        return self._nodes.host, self._nodes.port

    def _stop(self, *_: object) -> None:
        self._is_stopping = True

    def _join(self) -> dict[str, Any] | None:
        """What the leader says once it wants this node; None: there is none, or it ends without."""
        try:
            pipe = _connect(*self._place(), {"node": self._node})
        except OSError:
            return None
        except AuthenticationError as error:
            self._complain(f"the leader refuses this node: {error}; is {_KEY_VARIABLE} the same on all nodes?")
            return None
        with pipe:
            while not pipe.poll(_POLL_S):
                self._reap()
                if self._is_stopping:
                    return None
            try:
                told = pipe.recv_bytes(MOST_BYTES)
            except (EOFError, OSError):
                return None
        try:
            return dict(json.loads(told))
        except (ValueError, TypeError):
            self._complain(f"the leader wants a key: set {_KEY_VARIABLE} to the same on all nodes")
            return None

    def _complain(self, text: str) -> None:
        """Once: it will be tried again all the time."""
        if text != self._complaint:
            self._complaint = text
            logger.warning("%s", text)

    def _start(self, ranks: Sequence[int], token: str) -> None:
        host, port = self._place()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for rank in ranks:
            words = [RANK_MODULE, host, str(port), str(rank), token, str(os.getpid())]
            self._ranks.append(
                subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-c", _JOIN, *words],
                    env=environment,
                    start_new_session=True,  # a signal that stops this node is not for them
                )
            )
        logger.info("started ranks %s", ranks)

    def _reap(self) -> None:
        for process in self._ranks[:]:
            if process.poll() is not None:
                self._ranks.remove(process)
                logger.info("a rank has ended with code %d", process.returncode)


_JOIN = "import importlib, sys; importlib.import_module(sys.argv[1]).join_from_afar(*sys.argv[2:])"


def _version() -> str:
    return importlib.metadata.version("modelserver-py")


def _key() -> bytes:
    return os.environ.get(_KEY_VARIABLE, "").encode()


def _connect(host: str, port: int, who: dict[str, Any]) -> Connection:
    pipe = _pipe_of(socket.create_connection((host, port), timeout=_GREET_S))
    try:
        with _hurry(pipe):
            if key := _key():
                answer_challenge(pipe, key)
                deliver_challenge(pipe, key)
            pipe.send_bytes(json.dumps({**who, "version": _version()}).encode())
    except EOFError:
        pipe.close()
        raise ConnectionResetError("the leader has closed the connection") from None
    except BaseException:
        pipe.close()
        raise
    return pipe


def _pipe_of(connected: socket.socket) -> Connection:
    """Messages over a connection whose kernel finds out when the other machine vanishes."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - _SILENCE_S // 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
    return Connection(connected.detach())


def _socket_of(pipe: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(pipe.fileno()))


@contextmanager
def _hurry(pipe: Connection) -> Iterator[None]:
    """While the block runs: end the connection when a greeting has taken too long."""
    with _socket_of(pipe) as connected:
        timer = threading.Timer(_GREET_S, _shut, (connected,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)

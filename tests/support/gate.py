"""A backend that a test holds back: it echoes its inputs, one batch at a time, when its gate lets it.

Served like any backend from outside the tree (`backend_directory`), in the test's own process, so that
a test knows which requests shared which batch without measuring time.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modelserver.backend import (
    Backend,
    BackendContext,
    BatchInstance,
    InferRequest,
    InferResponse,
    Placement,
    Tensor,
)

if TYPE_CHECKING:
    from support.async_clients import AsyncClient
    from support.clients import Answer, Array
    from support.serving import RunningServer

    from modelserver.execution.model import Model

BACKEND_DIRECTORY = str(Path(__file__).parent / "backends")
PATIENCE_S = 60.0

CONFIG = """
backend: "gate"
max_batch_size: {max_batch_size}
input [ {{ name: "INPUT0", data_type: TYPE_INT32, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_INT32, dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{more}
"""


class Gate:
    """Of all loaded models of one name. `batches` holds the ids of each batch's requests, in order of execution."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, ...]] = []
        self._is_open = True
        self._passing: set[str] = set()
        self._changed = threading.Condition()

    def hold(self) -> None:
        """Forget the batches so far; from now on they begin, and do not end before they may."""
        with self._changed:
            self.batches.clear()
            self._passing.clear()
            self._is_open = False

    def let(self, request_id: str) -> None:
        """The batch with this request may end."""
        with self._changed:
            self._passing.add(request_id)
            self._changed.notify_all()

    def release(self) -> None:
        """Every batch may end."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def pass_through(self, ids: tuple[str, ...]) -> None:
        """Called by the worker thread that executes a batch."""
        with self._changed:
            self.batches.append(ids)
            may_end = self._changed.wait_for(lambda: self._is_open or not self._passing.isdisjoint(ids), PATIENCE_S)
        assert may_end, "the test never released the gate"


_gates: dict[str, Gate] = {}


def gate_of(model: str) -> Gate:
    """The gate of a model, whether it is loaded yet or not."""
    return _gates.setdefault(model, Gate())


class GateInstance(BatchInstance):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        self._gate.pass_through(tuple(request.id for request in requests))
        return [InferResponse([_echo(request)]) for request in requests]


class GateBackend(Backend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._gate = gate_of(context.model_name)

    def create_instance(self, placement: Placement) -> GateInstance:
        return GateInstance(self._gate)


def _echo(request: InferRequest) -> Tensor:
    tensor = request.inputs["INPUT0"]
    return Tensor("OUTPUT0", tensor.datatype, tensor.data)


def write_gated(repository: Path, name: str, *, max_batch_size: int = 8, more: str = "") -> Gate:
    """A gated model in `repository`; its gate, open. `more` is further text of config.pbtxt."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(max_batch_size=max_batch_size, more=more))
    _gates[name] = Gate()
    return _gates[name]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Return when `condition` holds. Fails, naming `what`, when that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        await asyncio.sleep(0.002)


class GatedModel:
    """A gated model of a running server and a client of it: requests are sent one after the other and held.

    Leaving the block releases the gate and awaits what was sent.
    """

    def __init__(self, server: RunningServer, client: AsyncClient, name: str) -> None:
        self.name = name
        self.gate = gate_of(name)
        self.client = client
        self._server = server
        self._tasks: dict[str, asyncio.Task[Answer]] = {}

    async def __aenter__(self) -> GatedModel:
        self.gate.hold()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.release()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def start(
        self, request_id: str, *, rows: int = 1, width: int = 1, others: tuple[str, ...] = (), **details: Any
    ) -> asyncio.Task[Answer]:
        """Send a request whose data no other request has; `others` are further inputs."""
        data = np.full((rows, width), zlib.crc32(request_id.encode()) >> 1, np.int32)
        inputs = dict.fromkeys(("INPUT0", *others), data)
        infer = self.client.infer(self.name, inputs, request_id=request_id, **details)
        self._tasks[request_id] = asyncio.create_task(self._checked(infer, request_id, data))
        return self._tasks[request_id]

    async def send(self, request_id: str, **details: Any) -> asyncio.Task[Answer]:
        """Start a request and return once the model has accepted it."""
        before = self.inflight
        task = self.start(request_id, **details)
        await until(lambda: self.inflight > before or task.done(), f"'{request_id}' was accepted")
        return task

    async def block(self, request_id: str = "blocker", **details: Any) -> asyncio.Task[Answer]:
        """Send a request and return once it executes, and so keeps its instance."""
        task = await self.send(request_id, **details)
        await until(
            lambda: task.done() or any(request_id in batch for batch in self.gate.batches), f"'{request_id}' executed"
        )
        assert not task.done(), f"'{request_id}' was not held: {task.exception() or task.result()}"
        return task

    async def finish(self) -> list[Answer]:
        """Release the gate; the answers to all requests, in the order in which they were sent."""
        self.gate.release()
        return await asyncio.gather(*self._tasks.values())

    @property
    def queue_depth(self) -> int:
        """Requests that wait."""
        return self._sum(lambda model: model.queue_depth)

    @property
    def inflight(self) -> int:
        """Requests that wait or execute."""
        return self._sum(lambda model: model.inflight)

    def _sum(self, count: Callable[[Model], int]) -> int:
        models = self._server.server.repository.models
        return self._server.call(lambda: sum(count(model) for model in models() if model.name == self.name))

    async def _checked(self, infer: Coroutine[Any, Any, Answer], request_id: str, data: Array) -> Answer:
        answer = await infer
        assert answer.id == request_id
        np.testing.assert_array_equal(answer["OUTPUT0"], data)
        return answer

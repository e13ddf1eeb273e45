"""An instance in its own child process: supervised, restarted, and called through shared memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from modelserver.backend import (
    BackendContext,
    BatchInstance,
    InferResponse,
    Measurement,
    Placement,
    ServerCalls,
    ServerError,
    UnavailableError,
)
from modelserver.core.loop_thread import LoopThread
from modelserver.core.request import CallOrigin, InferRequest, is_in_flight
from modelserver.execution.process.in_flight_batch import Result
from modelserver.execution.process.lifecycle import Lifecycle, State
from modelserver.execution.process.recipe import ProcessOptions, Recipe, num_instances
from modelserver.execution.process.supervised_child import SupervisedChild
from modelserver.execution.process.supervisor import Supervisor
from modelserver.telemetry.measurement import ProcessRestarts


class ProcessInstance(BatchInstance):
    """Hosts any instance in a child process and executes its batches there.

    The constructor blocks until the instance is ready, and raises the ServerError that building it raised. A
    supervisor thread owns each child from start to end: it logs the output, notices the end, and starts the next.
    The connection to the child is on `loop`, which must be running in another thread; without `loop` it has its own
    thread. `child` is for that loop; `execute` blocks, and is for any other thread.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        options: ProcessOptions | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        server: ServerCalls | None = None,
        origin: CallOrigin | None = None,
        answers_later: bool = False,
    ) -> None:
        options = options or ProcessOptions()
        self.name = name
        self.busy_wait_us = options.busy_wait_us
        self._thread = LoopThread(f"{name}-loop") if loop is None else None
        self.loop = loop or self._thread_loop()
        self._life = life = Lifecycle(name, options.restart)
        self.child = SupervisedChild(
            life,
            recipe,
            options,
            loop=self.loop,
            server=server,
            origin=origin or CallOrigin(name),
            answers_later=answers_later,
        )
        self._supervisor = Supervisor(self.child, life, options)
        failure = self._supervisor.wait_for_start()
        if failure is not None:
            self._stop_loop()
            raise failure
        self.answers_later = self.child.answers_later
        self.is_stepped = self.child.is_stepped

    @classmethod
    def of_model(
        cls,
        context: BackendContext,
        placement: Placement,
        recipe: Recipe,
        options: ProcessOptions,
        *,
        answers_later: bool = False,
    ) -> ProcessInstance:
        """The instance of a model. If the context has a server, the child may call other models.

        `answers_later` is needed only if the child's instance cannot tell.
        """
        server = context.server
        return cls(
            placement.name,
            recipe,
            options,
            loop=server.loop if server is not None else None,
            server=server,
            origin=CallOrigin(placement.name, context.model_name, num_instances(context)),
            answers_later=answers_later,
        )

    @property
    def pid(self) -> int | None:
        """The process id of the current child."""
        return self._life.pid

    takes_several_batches = True

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        """Tell the child, before its next batch. Loop thread only."""
        self.child.end_sequence(correlation_id, reason)

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | ServerError | None]:
        """One batch in the child. Raises UnavailableError while the child is down, InternalError when it dies."""
        (result,) = self.execute_batches([requests])
        if isinstance(result, ServerError):
            raise result
        return result

    def execute_batches(self, batches: Sequence[Sequence[InferRequest]]) -> Sequence[Result]:
        """Batches in the child, one after the other; raises as `execute`. Blocks, so never on the loop thread."""
        results: list[Result | None] = [None] * len(batches)
        missing = len(batches)
        is_done = threading.Event()

        def on_done(index: int, result: Result) -> None:
            nonlocal missing
            results[index] = result
            missing -= 1
            if not missing:
                is_done.set()

        def send() -> None:
            for index, requests in enumerate(batches):
                assert is_in_flight(requests), "the server calls this"
                self.child.begin(requests, lambda result, _ns, index=index: on_done(index, result))  # type: ignore[misc]
            self.child.flush()

        if not self.child.post(send):
            raise UnavailableError(f"{self.name} is closed")
        is_done.wait()
        return [result for result in results if result is not None]

    def is_ready(self) -> bool:
        """Whether the child is up and, if its instance overrides `is_ready`, ready. Waits at most 5 ms."""
        if self._life.state is not State.READY:
            return False
        if not self.child.readiness.is_asked:
            return True
        if threading.get_ident() == self.child.loop_thread_id:
            return self.child.ask_ready()
        answers: list[bool] = []
        is_done = threading.Event()

        def ask() -> None:
            answers.append(self.child.ask_ready())
            is_done.set()

        return self.child.post(ask) and is_done.wait() and answers[0]

    def can_execute(self) -> bool:
        """Whether there is a child to send a batch to."""
        return self._life.state is State.READY

    def count_restarts(self, restarts: ProcessRestarts) -> None:
        """Count restarts in `restarts` from now on. From any thread."""
        restarts.expect()
        self._life.restarts = restarts

    def measure(self) -> Sequence[Measurement]:
        """The last measurements of the child; empty while there is none."""
        return self.child.measured if self.can_execute() else ()

    def kill(self, why: str) -> None:
        """As `SupervisedChild.kill`. From any thread."""
        self.child.kill(why)

    def close(self) -> None:
        """Let the child finish; after `close_timeout_s` it shows its stack and is killed."""
        self._supervisor.close()
        self._stop_loop()

    def _thread_loop(self) -> asyncio.AbstractEventLoop:
        assert self._thread is not None, "the caller made it"
        return self._thread.loop

    def _stop_loop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

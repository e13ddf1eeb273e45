"""A scheduler, which takes a model's requests from their arrival to their responses, and what a worker asks of it."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.errors import ServerError
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.expiry import LoopCalls
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.queue import QueueEntry
from modelserver.scheduling.sequence import EndHook
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Batches for one worker: `Batcher`, which all workers share, or one instance's part of a `SequenceBatcher`."""

    @property
    def is_shared(self) -> bool:
        """Whether other workers of the model may take what this one leaves."""

    @property
    def takes_ahead(self) -> bool:
        """Whether a worker may take batches while its last one is being executed."""

    @property
    def num_sequences(self) -> int:
        """Sequences under way that only this worker can go on with."""

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """The next batch; or None, and when to look again (ns) if the worker is not woken before."""

    def pass_on(self, worker: WaitingWorker) -> None:
        """Skip this worker for now, and hand its wake-up to another."""

    def take_more(self, worker: WaitingWorker, limit: int) -> list[Batch]:
        """Batches that could run now together with the one just taken."""

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hand responses to their requests' streams. Called from the event loop thread."""

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop thread. From any thread."""

    def give_up(self) -> None:
        """End the sequences that the worker still waits for, because its instance is removed. From any thread."""

    def close_worker(self, worker: WaitingWorker) -> None:
        """Let the worker end. From any thread."""


class Scheduler(abc.ABC):
    """Accepts requests and answers each exactly once. Event loop thread, unless a method says otherwise.

    `on_idle` is called when nothing is under way any more.
    """

    # Requests are executed within `submit`, by runners that are attached, and not by workers that take batches.
    runs_directly: ClassVar[bool] = False
    # The model has sequences: their requests stay on one instance.
    has_sequences: ClassVar[bool] = False
    on_idle: Callable[[], None] | None = None

    @property
    @abc.abstractmethod
    def inflight(self) -> int:
        """Requests that were accepted and not yet answered."""

    @property
    def queue_depth(self) -> int:
        """Requests that no worker has taken yet."""
        return 0

    @property
    def num_sequences(self) -> int:
        """Sequences that are under way, or wait for their turn."""
        return 0

    def has_sequence(self, sequence_id: int | str) -> bool:  # noqa: ARG002
        """Whether a request that continues this sequence would be accepted."""
        return False

    @abc.abstractmethod
    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Accept the request, and answer it on its stream, perhaps before this returns.

        Raises UnavailableError (stopped, or the queue is full), CancelledError, or another ServerError of a request
        that cannot be accepted: then the caller answers.
        """

    def source(self, on_end: EndHook | None = None) -> BatchSource:
        """Where the worker of another instance takes its batches from. From any thread.

        `on_end` is called from that worker's thread when the instance sees no more of a sequence.
        """
        raise NotImplementedError(f"{type(self).__name__} has no queue that workers take batches from")

    def hurry(self) -> None:
        """Stop delaying requests to fill batches. Safe to repeat."""

    def reconfigure(self, config: ModelConfig) -> None:
        """Apply a changed `dynamic_batching`, which must have the same `preserve_ordering`, if there is one."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Refuse new requests and finish the accepted ones. Safe to repeat."""

    @abc.abstractmethod
    def abort(self, error: ServerError) -> None:
        """Refuse new requests, and answer waiting ones with `error`. From any thread."""


class QueueScheduler(Scheduler):
    """A scheduler whose requests wait until workers take them. `inflight` belongs to the event loop thread."""

    inflight: int = 0

    def __init__(self, model_name: str, loop: LoopCalls, statistics: ModelStatistics, clock: Clock | None) -> None:
        self._model_name = model_name
        self._loop = loop
        self._statistics = statistics
        self.now_ns = (clock or SystemClock()).now_ns

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop thread, unless the loop is closed. From any thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("model '%s': the event loop is closed, responses are dropped", self._model_name)

    def check_idle(self) -> None:
        """Report that nothing is under way any more, if that is so. Event loop thread."""
        if self.inflight == 0 and self.on_idle is not None:
            self.on_idle()

    def _hand_over(self, deliveries: Iterable[Delivery]) -> None:
        num_finished = 0
        for request, response in deliveries:
            num_finished += response.is_final
            try:
                request.stream.deliver(response)
            except Exception:
                logger.exception("model '%s': the reader of a response failed", self._model_name)
        self.inflight -= num_finished
        if self.inflight == 0 and self.on_idle is not None:
            self.check_idle()


def ages_ns(entries: Iterable[QueueEntry], now_ns: int) -> list[int]:
    """How long ago the requests of these entries arrived."""
    return [now_ns - entry.request.arrival_ns for entry in entries]

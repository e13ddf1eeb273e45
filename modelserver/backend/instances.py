"""What an instance of a model must be: it sees requests, whole batches, or goes step by step.

Part of the contract: authors import these names from `modelserver.backend`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.errors import ServerError
from modelserver.platform.cuda import DeviceArray
from modelserver.telemetry.measurement import Measurement

Array = np.ndarray[Any, Any]

# What `BatchInstance.execute` returns.
Answers = Sequence[InferResponse | ServerError] | Sequence[InferResponse | ServerError | None] | None


class Instance:
    """One executable copy of a model on one placement."""

    def close(self) -> None:
        """Free what the instance holds. Called once, when no call is in progress."""

    def is_ready(self) -> bool:
        """Whether the instance can execute now; asked by the model-ready endpoints only."""
        return True

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        """The instance sees no more of a sequence of which it has seen a request: it may free what it kept of it.

        Only of models with `sequence_batching`; called between batches, by the caller of `execute`. `reason` is
        "end" (its last request was executed), "idle" (no request came for `max_sequence_idle_microseconds`),
        "cancelled" (a client gave up one of its requests), "restarted" (a START came before an END) or "unloaded".
        """

    def measure(self) -> Sequence[Measurement]:
        """Numbers of its own for the metrics page. Asked at each scrape on the event loop thread: it must be quick."""
        return ()

    def can_execute(self) -> bool:
        """False while a call would have to wait, as for a process that is being restarted: others then go first.

        Asked before every batch, so it must not block.
        """
        return True


class BatchInstance(Instance, abc.ABC):
    """An instance that sees requests: full control over each request's inputs, outputs and errors."""

    # Whether `execute` may leave requests unanswered, to answer them later or many times. Read once, when the
    # instance stands. It is what a decoupled model needs, and costs every request a little.
    answers_later: bool = False

    @abc.abstractmethod
    def execute(self, requests: Sequence[InferRequest]) -> Answers:
        """One entry per request, in order; an error fails that request alone.

        An exception fails every request of the batch. Outputs that a request did not ask for may be
        present: the server drops them. RESCHEDULE is the entry of a request that is to be executed once more, of
        models with `iterative_sequence` only.

        Where `answers_later`, the entry None (or None for all of them) leaves the answer to `request.sender`, which
        has to be taken before `execute` returns; any other entry is the request's final response. An exception then
        fails those requests that have not ended.
        """

    # Whether reaching the instance costs enough that short batches had better travel there together.
    takes_several_batches: ClassVar[bool] = False

    def execute_batches(self, batches: Sequence[Sequence[InferRequest]]) -> Sequence[Answers | ServerError]:
        """For each batch what `execute` returns for it, or the error that failed it.

        Called only where `takes_several_batches`, with batches that are known to be short.
        """
        results: list[Answers | ServerError] = []
        for requests in batches:
            try:
                results.append(self.execute(requests))
            except ServerError as error:
                results.append(error)
        return results


class TensorInstance(Instance, abc.ABC):
    """An instance that sees whole batches: the server concatenates inputs and splits outputs by rows."""

    # Whether `interrupt` does anything. Read once, when the instance stands.
    can_be_interrupted: bool = False

    def interrupt(self, is_wanted: bool) -> None:
        """Let the run in progress, or the next one, end at once and raise CancelledError; with False, let runs be.

        Its outputs are no longer wanted. Called from any thread, and not for long: the server says False
        before it lets the instance run for another request.
        """

    # The GPU whose memory `run_on_device` takes; None: the server calls `run`. Read once, when the instance stands.
    gpu: int | None = None

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        """As `run`, called in its place where `gpu` is set: inputs may lie in registered memory of that GPU.

        `targets` has memory for some outputs, as bytes. An output that fits is best written there, and returned as
        `target.beginning(dtype, shape)`; an array is right too. All work on inputs and targets must have ended when
        this returns. Batches of several requests come as arrays, without targets.
        """
        raise NotImplementedError("an instance with `gpu` overrides run_on_device")

    @abc.abstractmethod
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute the outputs for one batch, as arrays keyed by the config's output names.

        Arrays may be read-only views. With `max_batch_size` > 0 the first dimension of every array is
        the batch. An exception fails every request of the batch.
        """


class StepInstance(Instance, abc.ABC):
    """An instance that works on all its requests at once, step by step, and takes more on between steps.

    For continuous batching, as of language models. A worker thread of the server calls `add` for each request as it
    comes, `abort` for those whose clients have left, and `step` for as long as `has_work`; without work it sleeps.
    Answers go by `request.sender`, which `add` has to take. The sender must never be waited for within a step, so
    send with `wait=False`; where `has_room` of the sender is false, its client reads more slowly than the model writes.
    """

    @abc.abstractmethod
    def add(self, request: InferRequest) -> None:
        """Take a request on. An exception refuses it alone: a ServerError is its answer."""

    @abc.abstractmethod
    def abort(self, request: InferRequest) -> None:
        """Forget a request, and free what is kept for it: its client has left, or got an error.

        Called at most once for a request that was taken on, before the next step, also when it has just been
        finished: then there is nothing to do. The server answers it.
        """

    @abc.abstractmethod
    def step(self) -> None:
        """Go one step further with the requests at hand, and send what it gave.

        An exception fails all of them: each is aborted, and the instance goes on with those that come. If it still
        has work then, or `abort` fails too, it is not called again: it is not ready, and requests are refused.
        """

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether there is anything to do in a step."""

    @property
    def has_room(self) -> bool:
        """Whether the instance would take another request on now; if not, those that come wait in the model's queue.

        Asked before every step. There they can time out, and others can be refused because of `max_queue_size`.
        """
        return True


# What a backend may make.
AnyInstance = BatchInstance | TensorInstance | StepInstance

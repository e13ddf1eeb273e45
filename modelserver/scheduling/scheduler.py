"""What every scheduler is: the way of a model's requests from their arrival to their responses."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from modelserver.config.schema import ModelConfig
from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.errors import ServerError
from modelserver.scheduling.sequence import EndHook
from modelserver.scheduling.source import BatchSource


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
        """Requests that were accepted and are not answered."""

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
        """No request waits for company in its batch any more. Safe to repeat."""

    def reconfigure(self, config: ModelConfig) -> None:
        """Follow another `dynamic_batching` that preserves the same order, if there is one."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Refuse new requests, and finish the accepted ones. Safe to repeat."""

    @abc.abstractmethod
    def abort(self, error: ServerError) -> None:
        """Refuse new requests, and answer those that wait with `error`. From any thread."""

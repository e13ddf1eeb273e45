"""The response cache of one loaded model: equal requests are executed once, and later ones not at all.

A request whose answer is kept gets it. Otherwise it leads a flight: it is executed, and equal requests that arrive
meanwhile wait for its answer. If it was cancelled, the next one leads. If it failed, all that waited are executed, each
for itself, because a failure is not shared.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from modelserver.backend import BackendContext
from modelserver.cache.store import (
    NO_CACHE_PARAMETER,
    AnswerStore,
    CachedAnswer,
    RequestKey,
    input_size,
    make_key,
    response_size,
)
from modelserver.core.clock import Clock
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, RelayStream, ResponseStream
from modelserver.errors import CancelledError, ErrorCode, QueueTimeoutError, ServerError
from modelserver.scheduling.admission import refuse
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason

logger = logging.getLogger(__name__)

# Above this size requests and responses are hashed and copied by a thread instead of the event loop.
_LOOP_BYTES = 128 << 10
# At most this many requests wait for the answers of others. Further ones are executed, so the queue bounds them.
_MAX_WAITING = 100_000

Submit = Callable[[InFlightRequest], ResponseStream]


class _Query:
    """A request on its way through the cache."""

    __slots__ = ("began_ns", "key", "lookup_ns", "request", "timer")

    def __init__(self, request: InFlightRequest, key: RequestKey, began_ns: int) -> None:
        self.request = request
        self.key = key
        self.began_ns = began_ns
        self.lookup_ns = 0
        self.timer: asyncio.TimerHandle | None = None


class _Flight:
    """A request that is looked up or executed, and the equal ones that wait for its answer."""

    __slots__ = ("leader", "waiting")

    def __init__(self, leader: _Query) -> None:
        self.leader = leader
        self.waiting: dict[_Query, None] = {}  # in the order of arrival

    def suits(self, query: _Query) -> bool:
        """Whether a request may wait for this one: it is equal, and has the same priority."""
        key = self.leader.key
        return query.request.priority == self.leader.request.priority and query.key.is_equal(key.head, key.check)


class _LeaderStream(RelayStream):
    """Passes a leader's answer on, and then to the cache."""

    __slots__ = ("_land",)

    def __init__(self, reader: ResponseStream, land: Callable[[InferResponse], None]) -> None:
        super().__init__(reader)
        self._land = land

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        try:
            super().deliver(response)
        finally:
            self._land(response)


class ResponseCache:
    """The cache in front of a model's scheduler, which `submit` calls. Event loop thread, unless it says otherwise.

    `generation` returns the name of this load of the model. `num_waiting` requests were accepted here and not yet
    handed to the scheduler; `on_idle` is called when there are none left.
    """

    def __init__(
        self,
        store: AnswerStore,
        generation: Callable[[], bytes],
        submit: Submit,
        *,
        model_name: str,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        self.num_waiting = 0
        self.on_idle: Callable[[], None] | None = None
        self._store = store
        self._generation = generation
        self._submit = submit
        self._model_name = model_name
        self._statistics = statistics
        self._loop = loop
        self._now_ns = clock.now_ns
        self._flights: dict[bytes, _Flight] = {}
        self._generations: set[bytes] = set()
        self._is_stopped = False
        self._finish_stop: Callable[[], None] | None = None

    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Answer the request from the cache, let it wait for an equal one, or hand it to the scheduler.

        Raises as the scheduler's `submit` does. A request that may be cached gets that error as its response instead.
        """
        now_ns = self._now_ns()
        if request.arrival_ns == 0:
            request.arrival_ns = now_ns
        if self._is_stopped or request.is_cancelled or request.deadline_ns is not None:
            refusal = refuse(request, self._model_name, self._statistics, now_ns, is_stopped=self._is_stopped)
            if refusal is not None:
                raise refusal
        if not _may_be_cached(request):
            return self._submit(request)
        reader = request.stream
        if input_size(request) <= _LOOP_BYTES:
            self._begin(_Query(request, make_key(request, self._current_generation()), now_ns))
        else:
            self.num_waiting += 1
            made = self._loop.run_in_executor(None, make_key, request, self._current_generation())
            made.add_done_callback(partial(self._on_key, request, now_ns))
        return reader

    def stop(self, then: Callable[[], None]) -> None:
        """Refuse new requests; call `then` once the scheduler has all those accepted before."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for generation in self._generations:
            self._store.forget(generation)
        if self.num_waiting:
            self._finish_stop = then
        else:
            then()

    def _current_generation(self) -> bytes:
        generation = self._generation()
        if generation not in self._generations:
            for former in self._generations:
                self._store.forget(former)
            self._generations = {generation}
        return generation

    def _on_key(self, request: InFlightRequest, began_ns: int, made: asyncio.Future[RequestKey]) -> None:
        error = made.exception()
        if error is None:
            self._begin(_Query(request, made.result(), began_ns))
        else:
            logger.error("model '%s': a request has no key for the cache", self._model_name, exc_info=error)
            self._hand_on(request)
        self._end_wait()

    def _begin(self, query: _Query) -> None:
        digest = query.key.digest
        flight = self._flights.get(digest)
        if flight is None:
            flight = self._flights[digest] = _Flight(query)
            self.num_waiting += 1
            self._store.look_up(query.key, partial(self._on_found, query, flight))
        elif flight.suits(query) and self.num_waiting < _MAX_WAITING:
            self._wait(query, flight)
        else:
            self._lead(query, None)

    def _on_found(self, query: _Query, flight: _Flight, answer: CachedAnswer | None) -> None:
        query.lookup_ns = self._now_ns() - query.began_ns
        if answer is None:
            self._lead(query, flight)
        else:
            del self._flights[query.key.digest]
            self._answer(query, answer.response())
            for waiting in flight.waiting:
                self._answer_waiting(waiting, answer.response())
        self._end_wait()

    def _lead(self, query: _Query, flight: _Flight | None) -> None:
        """Have the request executed. If it leads a flight, its answer is the flight's."""
        request = query.request
        request.stream = _LeaderStream(request.stream, partial(self._on_landed, query, flight))
        self._hand_on(request)

    def _hand_on(self, request: InFlightRequest) -> None:
        request.on_cancel = None
        try:
            self._submit(request)
        except ServerError as error:
            request.stream.deliver(InferResponse(error=error))

    def _on_landed(self, query: _Query, flight: _Flight | None, response: InferResponse) -> None:
        """A leader's answer was delivered: answer the requests that wait for it, and keep it."""
        error = response.error
        if flight is not None:
            if error is not None and error.code is ErrorCode.CANCELLED and flight.waiting:
                # In a turn of its own, so that many cancels in a row do not recurse.
                flight.leader = next(iter(flight.waiting))
                del flight.waiting[flight.leader]
                self._loop.call_soon(self._lead_next, flight)
            else:
                del self._flights[query.key.digest]
                for waiting in flight.waiting:
                    if error is None:
                        self._answer_waiting(waiting, _again(response))
                    else:
                        self._loop.call_soon(self._lead_alone, waiting, flight)
        if error is None and not self._is_stopped:
            self._keep(query, response)
        else:
            self._statistics.record_cache_miss(query.lookup_ns)

    def _lead_next(self, flight: _Flight) -> None:
        _forget_timer(flight.leader)
        self._lead(flight.leader, flight)
        self._end_wait()

    def _lead_alone(self, query: _Query, flight: _Flight) -> None:
        if query not in flight.waiting:
            return  # it left in between
        del flight.waiting[query]
        _forget_timer(query)
        self._lead(query, None)
        self._end_wait()

    # Keeping answers.

    def _keep(self, query: _Query, response: InferResponse) -> None:
        began_ns = self._now_ns()
        if response_size(response) <= _LOOP_BYTES:
            self._insert(query, self._store.pack(query.key, response), began_ns)
            return
        packed = self._loop.run_in_executor(None, self._store.pack, query.key, response)
        packed.add_done_callback(lambda done: self._insert(query, done.result(), began_ns))

    def _insert(self, query: _Query, packed: Any, began_ns: int) -> None:
        if packed is not None and not self._is_stopped:
            self._store.insert(query.key, packed)
        self._statistics.record_cache_miss(query.lookup_ns + self._now_ns() - began_ns)

    # Requests that wait for another's answer.

    def _wait(self, query: _Query, flight: _Flight) -> None:
        self.num_waiting += 1
        flight.waiting[query] = None
        request = query.request
        request.on_cancel = partial(self._on_cancel, query, flight)
        if request.deadline_ns is not None:
            left_s = max(0, request.deadline_ns - self._now_ns()) / 1e9
            query.timer = self._loop.call_later(left_s, self._on_deadline, query, flight)

    def _on_cancel(self, query: _Query, flight: _Flight, _request: InFlightRequest) -> None:
        error = CancelledError(f"request to model '{self._model_name}' was cancelled")
        self._give_up(query, flight, FailureReason.CANCELED, error)

    def _on_deadline(self, query: _Query, flight: _Flight) -> None:
        error = QueueTimeoutError(
            f"Request timeout expired: its deadline passed while an equal request to model '{self._model_name}' "
            "was executed"
        )
        self._give_up(query, flight, FailureReason.REJECTED, error)

    def _give_up(self, query: _Query, flight: _Flight, reason: FailureReason, error: ServerError) -> None:
        if query not in flight.waiting:
            return  # it has become the leader, and belongs to the scheduler
        del flight.waiting[query]
        _forget_timer(query)
        self._statistics.record_failures(reason, (self._now_ns() - query.request.arrival_ns,))
        query.request.stream.deliver(InferResponse(error=error))
        self._end_wait()

    def _answer_waiting(self, query: _Query, response: InferResponse) -> None:
        _forget_timer(query)
        query.request.on_cancel = None
        self._answer(query, response)
        self._end_wait()

    def _answer(self, query: _Query, response: InferResponse) -> None:
        now_ns = self._now_ns()
        lookup_ns = query.lookup_ns or now_ns - query.began_ns
        self._statistics.record_cache_hit(now_ns - query.request.arrival_ns, lookup_ns)
        query.request.stream.deliver(response)

    def _end_wait(self) -> None:
        self.num_waiting -= 1
        if self.num_waiting:
            return
        finish, self._finish_stop = self._finish_stop, None
        if finish is not None:
            finish()
        if self.on_idle is not None:
            self.on_idle()


def _may_be_cached(request: InFlightRequest) -> bool:
    """Whether it has one answer, its client allows caching, and its inputs cannot change meanwhile."""
    transfer = request.transfer
    if request.is_decoupled or (transfer is not None and transfer.inputs):
        return False
    return request.parameters.get(NO_CACHE_PARAMETER) is not True


def _again(response: InferResponse) -> InferResponse:
    """The same answer for another request."""
    return InferResponse(outputs=list(response.outputs), parameters=response.parameters)


def _forget_timer(query: _Query) -> None:
    if query.timer is not None:
        query.timer.cancel()
        query.timer = None


_RANDOM_BYTES = 16


def make_generation(context: BackendContext, *, is_shared: bool) -> bytes:
    """The name of a load in the keys of cached answers: unique; or, for a cache that servers share, what was loaded.

    A shared name is the same wherever the config and the files (by path, size and time of change) are the same.
    Blocking if it is shared.
    """
    model = repr((context.namespace, context.model_name, context.version)).encode()
    if not is_shared:
        return model + os.urandom(_RANDOM_BYTES)
    content = blake2b(repr(context.config).encode(), digest_size=_RANDOM_BYTES)
    for directory in dict.fromkeys((context.model_directory, context.version_directory)):
        for path in sorted(_files(directory, is_deep=directory == context.version_directory)):
            status = path.stat()
            content.update(repr((path.name, str(path.parent.relative_to(directory)))).encode())
            content.update(repr((status.st_size, status.st_mtime_ns)).encode())
    return model + content.digest()


def _files(directory: Path, *, is_deep: bool) -> Iterator[Path]:
    """The files of a directory, with `is_deep` also those below it. Python's own caches do not count."""
    for root, names, files in os.walk(directory):
        names[:] = [name for name in names if is_deep and name != "__pycache__"]
        yield from (Path(root, name) for name in files)

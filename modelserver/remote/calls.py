"""The attempts of one request: which endpoint, how long, whether to try again or at two places at once."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from modelserver.backend import Datatype, ErrorCode, InferRequest, ServerError, UnavailableError
from modelserver.client.call_error import CallError
from modelserver.endpoints.endpoint import Endpoint, EndpointState, Outcome
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.protocol.kserve import HOPS
from modelserver.remote.options import Affinity, RemoteOptions
from modelserver.remote.v2 import Sent, Transport

BACK_OFF_S = 0.025
# A caller that gives up sooner says nothing about the endpoint.
SLOW_S = 1.0
MAX_PAUSE_S = 300.0
# Of a request's first input: what decides which endpoint it prefers.
PREFIX_BYTES = 2048
# Sequences that are remembered; the one that was used least recently is forgotten.
MAX_SEQUENCES = 65_536
_NUM_LATENCIES = 256
_REQUESTS_PER_HEDGE = 20
_LOST = frozenset({Outcome.CONNECT_FAILED, Outcome.LOST})

T = TypeVar("T")
Work = Callable[[Transport, Sent], Awaitable[T]]


class RemoteCalls:
    """Sends requests to the endpoints of one model. On the event loop."""

    def __init__(
        self, options: RemoteOptions, endpoints: EndpointSet, transport: Callable[[Endpoint], Transport]
    ) -> None:
        self.endpoints = endpoints
        self.num_hedges = 0
        self._options = options
        self._transport = transport
        self._sequences: OrderedDict[int | str, Endpoint] = OrderedDict()
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._num_requests = 0
        self._hedge_s = int(options.hedge_after) / 1000 if options.hedge_after.isdigit() else None

    async def run(self, request: InferRequest, hops: int, work: Work[T], *, has_begun: Callable[[], bool]) -> T:
        """What `work` returns, of the first attempt that succeeds. Once it `has_begun`, it is not tried again.

        Raises a ServerError that names the endpoint.
        """
        self.endpoints.retry_budget.deposit()
        self._num_requests += 1
        if request.sequence_id:
            return await self._in_sequence(request, hops, work)
        if self._options.hedge_after:
            return await self._hedged(request, hops, work)
        return await self._tried(request, hops, work, [], has_begun)

    async def _tried(
        self,
        request: InferRequest,
        hops: int,
        work: Work[T],
        used: list[Endpoint],
        has_begun: Callable[[], bool],
    ) -> T:
        """Try endpoints other than those `used`, to which its own are added."""
        key, failures, ends_s = self._key(request), dict[str, str](), self._ends_s(request)
        while True:
            endpoint = self.endpoints.choose(key=key, excluded=used)
            used.append(endpoint)
            try:
                return await self._attempt(endpoint, work, hops, ends_s)
            except CallError as error:
                is_last = len(failures) >= self._options.retries or has_begun()
                may_repeat = error.is_unprocessed or (
                    self._options.is_idempotent and error.outcome is not Outcome.CLIENT_ERROR
                )
                is_late = ends_s is not None and time.monotonic() + BACK_OFF_S >= ends_s
                if is_last or is_late or not may_repeat or not self.endpoints.retry_budget.take():
                    raise _named(error, endpoint, failures) from None
                failures[endpoint.address] = error.message
                endpoint.num_retries += 1
                if not self._has_other(used):
                    used.clear()
                    await asyncio.sleep(BACK_OFF_S * 2 ** len(failures))

    def _has_other(self, used: list[Endpoint]) -> bool:
        try:
            self.endpoints.choose(excluded=used)
        except UnavailableError:
            return False
        return True

    async def _attempt(self, endpoint: Endpoint, work: Work[T], hops: int, ends_s: float | None) -> T:
        endpoints, began_s = self.endpoints, time.monotonic()
        start_ns = endpoints.clock.now_ns()
        outcome, problem = Outcome.ABANDONED, ""
        endpoints.begin(endpoint)
        try:
            headers = {**self.headers(), HOPS: str(hops)}
            async with asyncio.timeout(None if ends_s is None else max(0.0, ends_s - began_s)):
                result = await work(self._transport(endpoint), Sent(headers, hops, ends_s))
            outcome = Outcome.DONE
            self._note_latency(time.monotonic() - began_s)
            return result
        except TimeoutError:
            seconds = time.monotonic() - began_s
            if seconds >= SLOW_S:
                outcome, problem = Outcome.TIMED_OUT, f"no answer within {seconds:.3g} s"
            raise CallError(
                f"no answer within {seconds:.3g} s", code=ErrorCode.TIMED_OUT, outcome=Outcome.TIMED_OUT
            ) from None
        except CallError as error:
            outcome, problem = error.outcome, error.message
            if error.retry_after_s is not None and outcome is Outcome.OVERLOADED:
                endpoints.pause(endpoint, min(error.retry_after_s, MAX_PAUSE_S))
            raise
        finally:
            endpoints.finish(endpoint, outcome, start_ns=start_ns, problem=problem)

    def headers(self) -> dict[str, str]:
        """The headers of every request. Raises UnavailableError if the key is not there."""
        key = self._options.secret.read()
        return {**({"authorization": f"Bearer {key}"} if key else {}), **self._options.headers}

    def _ends_s(self, request: InferRequest) -> float | None:
        ends = [request.deadline_ns / 1e9] if request.deadline_ns is not None else []
        if self._options.timeout_s and not request.is_decoupled:
            ends.append(time.monotonic() + self._options.timeout_s)
        return min(ends, default=None)

    def _key(self, request: InferRequest) -> bytes | None:
        affinity = self._options.affinity
        if affinity is Affinity.SESSION:
            session = request.parameters.get("x-session-id") or request.parameters.get("session_id")
            return str(session).encode() if session else None
        if affinity is not Affinity.PREFIX or not request.inputs:
            return None
        tensor = request.inputs.get("messages") or request.inputs.get("text_input")
        tensor = tensor or next(iter(request.inputs.values()))
        if tensor.datatype is Datatype.BYTES:
            first = tensor.data.flat[0] if tensor.data.size else b""
            return first[:PREFIX_BYTES] if isinstance(first, bytes) else str(first).encode()[:PREFIX_BYTES]
        return tensor.data.ravel()[: PREFIX_BYTES // max(1, tensor.data.itemsize)].tobytes()

    # Sequences

    async def _in_sequence(self, request: InferRequest, hops: int, work: Work[T]) -> T:
        """Send a request of a sequence to the endpoint that has it; never twice, and never elsewhere."""
        name = request.sequence_id
        endpoint = None if request.sequence_start else self._sequences.get(name)
        if endpoint is None:
            endpoint = self.endpoints.choose(key=str(name).encode())
        elif endpoint.state is EndpointState.DOWN or (not endpoint.is_member and endpoint.connection_failures):
            del self._sequences[name]
            raise UnavailableError(
                f"sequence {name} was at the endpoint {endpoint.address}, which is gone ({endpoint.problem}): start "
                "the sequence again"
            )
        self._sequences[name] = endpoint
        self._sequences.move_to_end(name)
        if len(self._sequences) > MAX_SEQUENCES:
            self._sequences.popitem(last=False)
        try:
            return await self._attempt(endpoint, work, hops, self._ends_s(request))
        except CallError as error:
            if error.outcome in _LOST:
                self._sequences.pop(name, None)
                error.message += f"; sequence {name} is lost with it: start the sequence again"
            raise _named(error, endpoint, {}) from None
        finally:
            if request.sequence_end:
                self._sequences.pop(name, None)

    # Hedging

    def _note_latency(self, seconds: float) -> None:
        self._latencies.append(seconds)
        if self._options.hedge_after == "p95" and len(self._latencies) >= 20 and self._num_requests % 20 == 0:
            self._hedge_s = sorted(self._latencies)[len(self._latencies) * 95 // 100]

    async def _hedged(self, request: InferRequest, hops: int, work: Work[T]) -> T:
        """Ask a second endpoint if the first is slow, and take the answer that comes first."""
        used: list[Endpoint] = []
        first = asyncio.ensure_future(self._tried(request, hops, work, used, lambda: False))
        running = {first}
        try:
            await asyncio.wait(running, timeout=self._hedge_s)
            is_allowed = self.num_hedges * _REQUESTS_PER_HEDGE < self._num_requests
            if not first.done() and self._hedge_s is not None and is_allowed and self._has_other(used):
                self.num_hedges += 1
                running.add(asyncio.ensure_future(self._tried(request, hops, work, list(used), lambda: False)))
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None or not running:
                        return await task
        finally:
            for task in {first, *running}:
                task.cancel()


def _named(error: CallError, endpoint: Endpoint, failures: dict[str, str]) -> ServerError:
    """The error with the address of its endpoint, and of those that were tried before it."""
    error.message = f"endpoint {endpoint.address}: {error.message}"
    if failures:
        error.message += f" (before it: {'; '.join(f'{name}: {text}' for name, text in failures.items())})"
    error.args = (error.message,)
    return error

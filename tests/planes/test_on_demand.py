"""Requests that wait for their model: how each of them ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from support.gate import until

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import (
    CancelledError,
    InternalError,
    LoadOnDemandError,
    NotFoundError,
    QueueFullError,
    QueueTimeoutError,
    UnavailableError,
)
from modelserver.planes.on_demand import WaitingRequests


class Bed:
    """A model that is unloaded until `loaded` is set, and then answers or raises the next of `errors`."""

    def __init__(self, *, max_waiting: int = 10) -> None:
        self.loaded = asyncio.Event()
        self.errors: list[Exception] = []
        self.num_loads = 0
        self.waiting = WaitingRequests(self.infer, max_waiting=max_waiting)

    def infer(self, request: InFlightRequest) -> ResponseStream:
        if self.errors:
            raise self.errors.pop(0)
        request.stream.deliver(InferResponse())
        return request.stream

    async def _load_model(self) -> None:
        self.num_loads += 1
        await self.loaded.wait()

    def unloaded_error(self, load: Callable[[], Awaitable[None]] | None = None) -> LoadOnDemandError:
        return LoadOnDemandError("unloaded", load or self._load_model)

    def send(
        self, *, deadline_ms: int | None = None, load: Callable[[], Awaitable[None]] | None = None
    ) -> InFlightRequest:
        request = InFlightRequest(model_name="m", version=None, inputs={})
        if deadline_ms is not None:
            request.deadline_ns = time.monotonic_ns() + deadline_ms * 1_000_000
        self.waiting.wait(request, self.unloaded_error(load))
        return request


async def test_it_is_answered_when_the_model_serves() -> None:
    bed = Bed()
    request = bed.send(deadline_ms=20_000)
    await asyncio.sleep(0)
    assert bed.waiting.num_waiting == 1
    bed.loaded.set()
    await request.stream.only()
    await asyncio.sleep(0)
    assert bed.waiting.num_waiting == 0


async def test_its_deadline_bounds_the_wait() -> None:
    bed = Bed()
    with pytest.raises(QueueTimeoutError, match="loaded on demand"):
        await bed.send(deadline_ms=1).stream.only()
    with pytest.raises(QueueTimeoutError):
        await bed.send(deadline_ms=-5).stream.only()


async def test_a_client_may_leave() -> None:
    bed = Bed()
    request = bed.send()
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(CancelledError):
        await request.stream.only()
    assert bed.waiting.num_waiting == 0


async def test_a_client_may_leave_before_anything_has_begun() -> None:
    bed = Bed()
    request = bed.send()
    request.cancel()
    with pytest.raises(CancelledError):
        await request.stream.only()
    assert bed.waiting.num_waiting == 0


async def test_the_end_of_the_server_is_theirs() -> None:
    bed = Bed()
    requests = [bed.send() for _ in range(3)]
    await asyncio.sleep(0)
    bed.waiting.close()
    for request in requests:
        with pytest.raises(UnavailableError, match="shutting down"):
            await request.stream.only()


async def test_what_keeps_the_model_from_serving_is_said() -> None:
    async def fail() -> None:
        raise NotFoundError("gone")

    with pytest.raises(NotFoundError, match="gone"):
        await Bed().send(load=fail).stream.only()


async def test_a_model_that_leaves_again_is_loaded_again() -> None:
    bed = Bed()
    bed.loaded.set()
    bed.errors = [bed.unloaded_error(), bed.unloaded_error()]
    await bed.send().stream.only()
    assert bed.num_loads == 3
    bed.errors = [bed.unloaded_error() for _ in range(5)]
    with pytest.raises(UnavailableError, match="5 times"):
        await bed.send().stream.only()


async def test_who_asks_again_for_it_does_not_wait_twice() -> None:
    """As the data plane does, of which `infer` comes back to where the request waits."""
    bed = Bed()
    bed.loaded.set()
    is_loaded = False

    def infer(request: InFlightRequest) -> ResponseStream:
        nonlocal is_loaded
        if not is_loaded:
            is_loaded = bed.num_loads == 2
            return bed.waiting.wait(request, bed.unloaded_error())
        return Bed.infer(bed, request)

    bed.waiting = WaitingRequests(infer)
    request = bed.send()
    await request.stream.only()
    await until(lambda: bed.waiting.num_waiting == 0, "it waits no more")
    assert bed.num_loads == 3
    is_loaded, bed.num_loads = False, 3
    request = bed.send()
    with pytest.raises(UnavailableError, match="5 times"):
        await request.stream.only()
    request.cancel()  # the client leaves with its answer


async def test_what_a_fault_of_ours_does_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed()
    bed.loaded.set()
    bed.errors = [KeyError("a mistake")]
    with pytest.raises(InternalError, match="KeyError"):
        await bed.send().stream.only()
    assert "a mistake" in caplog.text


async def test_their_number_is_bounded() -> None:
    bed = Bed(max_waiting=2)
    requests = [bed.send(), bed.send()]
    with pytest.raises(QueueFullError) as caught:
        bed.send()
    assert caught.value.retry_after_s
    bed.loaded.set()
    for request in requests:
        await request.stream.only()

"""A small `StepInstance`: counts, for each of its requests, one number per step up to the request's IN."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.batching import tensor

from modelserver.backend import (
    Datatype,
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    Placement,
    RowResponse,
    StepInstance,
)
from modelserver.core.response import ResponseStream
from modelserver.core.sender import ResponseSender
from modelserver.errors import ServerError


class _Count:
    """How far a request is."""

    def __init__(self, request: InferRequest) -> None:
        self.sender: ResponseSender = request.sender
        self.end = int(request.inputs["IN"].data.ravel()[0])
        self.value = 0
        self.has_rows = bool(request.parameters.get("rows"))


class Counting(StepInstance):
    """`may_step` is the gate of each step; `aborted` and `num_steps` say what was called. IN < 0 is refused.

    `error` is raised by the next step, or by all of them with `fails_always`. A request with the parameter `rows` gets
    every other number as a row.
    """

    def __init__(self, placement: Placement | None = None, *, most: int = 1000) -> None:
        self.placement = placement
        self.may_step = threading.Event()
        self.may_step.set()
        self.counts: dict[InferRequest, _Count] = {}
        self.aborted: list[InferRequest] = []
        self.most_at_once = 0
        self.num_steps = 0
        self.error: BaseException | None = None
        self.abort_error: Exception | None = None
        self.is_stuck = False
        self.is_closed = False
        self._most = most

    def add(self, request: InferRequest) -> None:
        count = _Count(request)
        if count.end < 0:
            raise InvalidArgumentError(f"cannot count to {count.end}")
        self.counts[request] = count
        self.most_at_once = max(self.most_at_once, len(self.counts))

    def abort(self, request: InferRequest) -> None:
        if self.abort_error is not None:
            raise self.abort_error
        self.aborted.append(request)
        self.counts.pop(request, None)

    def step(self) -> None:
        assert self.may_step.wait(10), "the test left the gate shut"
        self.num_steps += 1
        error, self.error = self.error, None
        if error is not None:
            raise error
        for request, count in list(self.counts.items()):
            count.value += 1
            if count.value > count.end:
                count.sender.finish()
                del self.counts[request]
            elif count.has_rows and count.value % 2:
                row = RowResponse(values={"OUT": float(count.value)}, datatypes={"OUT": Datatype.FP32})
                count.sender.send(row, wait=False)
            else:
                response = InferResponse([tensor("OUT", np.full((1, 1), count.value, np.float32))])
                count.sender.send(response, wait=False)

    @property
    def has_work(self) -> bool:
        return bool(self.counts) or self.is_stuck

    @property
    def has_room(self) -> bool:
        return len(self.counts) < self._most

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


async def numbers(stream: ResponseStream) -> list[float]:
    """What a request is answered; raises its error."""
    values: list[float] = []
    async for response in stream:
        if response.error is not None:
            raise response.error
        values += [float(tensor.data.item()) for tensor in response.outputs]
    return values


async def error_of(stream: ResponseStream) -> ServerError:
    """The error that a request ends with."""
    with pytest.raises(ServerError) as caught:
        await numbers(stream)
    return caught.value

"""The responses to a request, and where they arrive: on the event loop, by callback or by `async for`.

A stream may stand before another one, to see or change what is delivered (`RelayStream`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import ClassVar

import msgspec
import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError, ServerError

ParameterValue = bool | int | float | str
# The one element of an output. That of a BYTES output may be text without lone surrogates, which is cheaper than bytes.
RowValue = bool | int | float | str | bytes


class InferResponse(msgspec.Struct, eq=False):
    """One response of a request: outputs, or an error. `is_final` marks the last one.

    A decoupled model may end with an *empty* final response: no outputs and no error.
    """

    outputs: list[Tensor] = []
    error: ServerError | None = None
    parameters: Mapping[str, ParameterValue] | None = None
    is_final: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether it has neither outputs nor an error; it may still be the last one."""
        return not self.outputs and not self.parameters and self.error is None


class RowResponse(InferResponse, eq=False):
    """A response whose outputs all have the shape [1]: `values` has the element of each by name, in their order.

    It costs a fraction of a response with tensors, which are made only for a reader that asks for `outputs`. A model
    that sends one for each token of many streams should send these. `datatypes` has those of its outputs, and may have
    more: one mapping should serve all responses of a model.
    """

    values: dict[str, RowValue] = {}
    datatypes: Mapping[str, Datatype] = {}
    tensors: list[Tensor] | None = None

    @property  # type: ignore[misc]  # over the field of the same name
    def outputs(self) -> list[Tensor]:
        if self.tensors is None:
            self.tensors = [_tensor_of(name, self.datatypes.get(name), value) for name, value in self.values.items()]
        return self.tensors

    @outputs.setter
    def outputs(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.values = {}


def _tensor_of(name: str, datatype: Datatype | None, value: RowValue) -> Tensor:
    """The tensor of shape [1] with this element. Raises InternalError for one that its datatype does not have."""
    if datatype is None:
        raise InternalError(f"a row has a value of '{name}', and no datatype of it")
    try:
        data = np.array([value.encode() if isinstance(value, str) else value], datatype.numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise InternalError(f"a row has a wrong value of '{name}', which is {datatype.value}: {error}") from error
    return Tensor(name, datatype, data)


# As an entry of what an instance returns: the request is not done and must be executed once more. Only for models with
# `iterative_sequence`; compared by identity.
RESCHEDULE = InferResponse(is_final=False)


ResponseCallback = Callable[[InferResponse], None]


class ResponseStream:
    """The loop's end of a request.

    The scheduler that owns the request calls `deliver` on the event loop thread, the last time with `is_final` set. A
    reader either calls `subscribe` (no Task, no Future: the infer path), or awaits `only()` or iterates. Responses that
    arrive before there is a reader are kept for it.
    """

    __slots__ = ("_callback", "_pending", "_waiter", "is_finished", "on_read")

    # A reader that may be slower than the model calls `has_read` once for each delivered response. For any other
    # reader, delivered responses count as read.
    reads_later: ClassVar[bool] = False
    # The client's protocol, for traces: HTTP or GRPC, or empty without a client.
    protocol: ClassVar[str] = ""

    def __init__(self) -> None:
        self._callback: ResponseCallback | None = None
        self._pending: deque[InferResponse] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_finished = False
        # Set by a sender that wants to know when there is room for more.
        self.on_read: Callable[[], None] | None = None

    def deliver(self, response: InferResponse) -> None:
        """Called from the event loop thread; responses after the final one are dropped."""
        if self.is_finished:
            return
        self.is_finished = response.is_final
        if self._callback is not None:
            self._callback(response)
            return
        if self._pending is None:
            self._pending = deque()
        self._pending.append(response)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def has_read(self) -> None:
        """One of the delivered responses has gone on its way to the client. Called from the event loop thread."""
        if self.on_read is not None:
            self.on_read()

    def subscribe(self, callback: ResponseCallback) -> None:
        """Call `callback(response)` for each response, beginning with those that have already arrived."""
        self._callback = callback
        pending, self._pending = self._pending, None
        for response in pending or ():
            callback(response)

    async def only(self) -> InferResponse:
        """The final response of a request that has just one; raises its error."""
        async for response in self:
            if response.error is not None:
                raise response.error
            if response.is_final:
                return response
        raise ServerError("the request ended without a response")

    async def __aiter__(self) -> AsyncIterator[InferResponse]:
        while True:
            while self._pending:
                response = self._pending.popleft()
                yield response
                if response.is_final:
                    return
            if self.is_finished:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class RelayStream(ResponseStream):
    """Delivers the result of `pass_on` for each response. Senders may query it as they would query the reader."""

    __slots__ = ("_reader",)

    def __init__(self, reader: ResponseStream) -> None:
        self._reader = reader
        self.is_finished = False

    @property
    def reads_later(self) -> bool:  # type: ignore[override]  # a constant of each kind of reader; here, of the one behind
        return self._reader.reads_later

    @property
    def on_read(self) -> Callable[[], None] | None:
        return self._reader.on_read

    @on_read.setter
    def on_read(self, callback: Callable[[], None] | None) -> None:
        self._reader.on_read = callback

    def has_read(self) -> None:
        self._reader.has_read()

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.is_finished = response.is_final
        self._reader.deliver(self.pass_on(response))

    def pass_on(self, response: InferResponse) -> InferResponse:
        """The response that the reader gets in place of `response`. Called once for each, on the event loop thread."""
        return response

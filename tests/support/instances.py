"""Small real backends for tests of scheduling and execution."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from modelserver.backend import (
    Array,
    Backend,
    BatchInstance,
    InferRequest,
    InferResponse,
    Instance,
    InvalidArgumentError,
    Placement,
    ServerError,
    Tensor,
    TensorInstance,
)
from modelserver.core.datatype import Datatype


def backend_of(make_instance: Callable[[Placement], Instance], **attributes: object) -> type[Backend]:
    """A backend class whose instances come from `make_instance`; `attributes` replace methods and class variables."""
    body = {"create_instance": lambda self, placement: make_instance(placement), **attributes}
    return type("TestBackend", (Backend,), body)


class Doubling(TensorInstance):
    """OUT = 2 * IN; notes the rows of each batch, and that it was closed."""

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement
        self.batches: list[int] = []
        self.is_closed = False

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.batches.append(inputs["IN"].shape[0])
        return {"OUT": inputs["IN"] * 2}

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


class Gated(Doubling):
    """Doubles when the gate is open; `entered` and `left` say that a batch is being and was executed."""

    def __init__(self, placement: Placement | None = None) -> None:
        super().__init__(placement)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.left = threading.Event()

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.entered.set()
        assert self.gate.wait(10), "the test left the gate shut"
        outputs = super().run(inputs)
        self.left.set()
        return outputs


class Choosy(BatchInstance):
    """OUT = 2 * IN for each request, but an error for those that hold a negative value."""

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        return [self._answer(request.inputs["IN"].data) for request in requests]

    def _answer(self, data: Array) -> InferResponse | ServerError:
        if np.any(data < 0):
            return InvalidArgumentError(f"negative value {data.min()}")
        return InferResponse([Tensor("OUT", Datatype.FP32, data * 2)])

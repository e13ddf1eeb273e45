"""What the backend of `test_contract.py` runs in its child processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from modelserver.backend import BatchInstance, InferRequest, InferResponse, Tensor
from modelserver.backend.child import write_record


class Times(BatchInstance):
    """Multiplies its input."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        answers = []
        for request in requests:
            data = request.inputs["IN"].data * request.inputs["IN"].data.dtype.type(self._factor)
            answers.append(InferResponse([Tensor("OUT", request.inputs["IN"].datatype, data)]))
        return answers


def create_instance(*, factor: float) -> Times:
    write_record(20, f"multiplying by {factor}")
    return Times(factor)


def product(*, numbers: list[int]) -> int:
    return math.prod(numbers)

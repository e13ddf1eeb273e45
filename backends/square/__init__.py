"""Triton's test backend `square`: a request with IN = n is answered n times, each time with OUT = n.

`IN` and `OUT` are INT32 [1]; the model is decoupled. All responses are sent within `execute`, as fast as they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modelserver.backend import (
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    Datatype,
    InferRequest,
    InferResponse,
    Placement,
    Tensor,
)


class SquareInstance(BatchInstance):
    answers_later = True

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            sender = request.sender
            data = request.inputs["IN"].data
            for _ in range(int(data.flat[0])):
                if sender.is_cancelled:
                    break
                sender.send(InferResponse([Tensor("OUT", Datatype.INT32, np.array(data))]))
            sender.finish()


class SquareBackend(Backend):
    option_names = frozenset[str]()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if not context.config.is_decoupled:
            raise ConfigError("the square backend needs model_transaction_policy { decoupled: true }")

    def create_instance(self, placement: Placement) -> SquareInstance:  # noqa: ARG002  # any will do
        return SquareInstance()


BACKEND = SquareBackend

"""The identity backend: output i is input i. The tutorial of `docs/backends.md`.

Triton's test parameters slow it down: `creation_delay_sec` (loading), `execute_delay_ms` (each batch) and
`instance_wise_delay_multiplier` (instance i takes that many times i as long).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from modelserver.backend import (
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    InferRequest,
    InferResponse,
    Placement,
    Tensor,
)


class IdentityInstance(BatchInstance):
    def __init__(self, names: dict[str, str], delay_s: float) -> None:
        self._names = names
        self._delay_s = delay_s

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        if self._delay_s:
            time.sleep(self._delay_s)
        names = self._names
        return [
            InferResponse([Tensor(names[given.name], given.datatype, given.data) for given in request.inputs.values()])
            for request in requests
        ]


class IdentityBackend(Backend):
    option_names = frozenset[str]()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        inputs, outputs = context.config.input, context.config.output
        if [spec.data_type for spec in inputs] != [spec.data_type for spec in outputs]:
            raise ConfigError("the identity backend needs as many outputs as inputs, of the same datatypes in order")
        self._names = {source.name: target.name for source, target in zip(inputs, outputs, strict=True)}
        self._delay_s = context.float_parameter("execute_delay_ms") / 1000
        self._multiplier = context.float_parameter("instance_wise_delay_multiplier")
        self.runs_inline = not self._delay_s

    def load(self) -> None:
        time.sleep(self.context.float_parameter("creation_delay_sec"))

    def create_instance(self, placement: Placement) -> IdentityInstance:
        return IdentityInstance(self._names, self._delay_s * max(1.0, self._multiplier * placement.index))


BACKEND = IdentityBackend

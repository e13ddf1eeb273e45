"""The sequence backend: adds up what the requests of a sequence bring. For tests of the sequence batcher.

OUTPUT is the sum of INPUT since the START, element by element. With the strategy `direct` a sum belongs to a row of
the batch, as it does in models that keep a state per slot; with `oldest` to a correlation id. All that is known
of a sequence comes from its control inputs, so the config has to name START, and READY (`direct`) or CORRID
(`oldest`). The parameter `execute_delay_ms` makes each batch take so long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from modelserver.backend import (
    Array,
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    InferRequest,
    InferResponse,
    Placement,
    Tensor,
)

_START, _READY, _CORRELATION_ID = (f"CONTROL_SEQUENCE_{kind}" for kind in ("START", "READY", "CORRID"))


class SequenceInstance(BatchInstance):
    def __init__(self, input_name: str, output_name: str, controls: dict[str, str], delay_s: float) -> None:
        self._input_name = input_name
        self._output_name = output_name
        self._start = controls[_START]
        self._ready = controls.get(_READY)
        self._correlation_id = controls.get(_CORRELATION_ID)
        self._delay_s = delay_s
        self._sums: dict[Any, Array] = {}

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        if self._delay_s:
            time.sleep(self._delay_s)
        return [self._add(row, request) for row, request in enumerate(requests)]

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:  # noqa: ARG002
        """With `oldest` the sum is not needed any more; a slot's goes with the next START."""
        self._sums.pop(correlation_id, None)

    def _add(self, row: int, request: InferRequest) -> InferResponse:
        tensor = request.inputs[self._input_name]
        if self._ready is not None and not request.inputs[self._ready].data.any():
            return InferResponse([Tensor(self._output_name, tensor.datatype, tensor.data)])
        key: Any = row
        if self._correlation_id is not None:
            key = request.inputs[self._correlation_id].data.item()
            key = key.decode() if isinstance(key, bytes) else key
        total = tensor.data
        if not request.inputs[self._start].data.any():
            total = total + self._sums.get(key, 0)
        self._sums[key] = total
        return InferResponse([Tensor(self._output_name, tensor.datatype, total)])


class SequenceBackend(Backend):
    option_names = frozenset[str]()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config = context.config
        batching = config.sequence_batching
        if len(config.input) != 1 or len(config.output) != 1 or batching is None:
            raise ConfigError("the sequence backend needs sequence_batching, one input and one output")
        self._controls = {
            control.kind.name: tensor.name for tensor in batching.control_input for control in tensor.control
        }
        needed = {_START, _READY if batching.oldest is None else _CORRELATION_ID}
        if not needed <= self._controls.keys():
            missing = ", ".join(sorted(needed - self._controls.keys()))
            raise ConfigError(f"the sequence backend needs a control_input for each of {missing}")
        if batching.oldest is None:
            self._controls.pop(_CORRELATION_ID, None)  # so that a request in a wrong row is noticed
        self._delay_s = context.float_parameter("execute_delay_ms") / 1000

    def create_instance(self, placement: Placement) -> SequenceInstance:  # noqa: ARG002
        config = self.context.config
        return SequenceInstance(config.input[0].name, config.output[0].name, self._controls, self._delay_s)


BACKEND = SequenceBackend

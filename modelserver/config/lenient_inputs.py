"""Inputs as clients of MLServer and KServe send them: under any name, of any numeric type, or column by column.

Only for models whose config has the parameter `lenient_inputs`; backends set it (`FileSignature.is_lenient`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from modelserver.config.schema import ModelConfig
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor, placeholder
from modelserver.errors import ConfigError, InvalidArgumentError

LENIENT_INPUTS = "lenient_inputs"
# A JSON list: the names of the columns of the only input, in order.
INPUT_COLUMNS = "input_columns"
_NOT_NUMERIC = frozenset({Datatype.BYTES, Datatype.BF16})


def with_lenient_inputs(config: ModelConfig, columns: tuple[str, ...]) -> ModelConfig:
    """`config` with both parameters, where it does not set them itself."""
    added = {LENIENT_INPUTS: "true", **({INPUT_COLUMNS: json.dumps(columns)} if columns else {})}
    return replace(config, parameters={**added, **config.parameters})


class LenientInputs:
    """Makes the inputs of a request those of the model, as far as that is unambiguous."""

    def __init__(self, config: ModelConfig) -> None:
        self._specs = {spec.name: (spec.data_type, spec.dims) for spec in config.input}
        self._is_batched = config.max_batch_size > 0
        self._columns: tuple[str, ...] = ()
        if len(config.input) == 1 and config.input[0].data_type not in _NOT_NUMERIC:
            self._columns = _read_columns(config)

    @classmethod
    def of(cls, config: ModelConfig) -> LenientInputs | None:
        """None for a model that takes only what its config says."""
        return cls(config) if config.parameters.get(LENIENT_INPUTS, "").strip().lower() == "true" else None

    def adapt(self, request: InFlightRequest) -> None:
        """Rename, convert or join the inputs; what does not fit is left to the check. Raises InvalidArgumentError."""
        inputs: Mapping[str, Tensor] = request.inputs
        if len(self._specs) == 1 and len(inputs) == 1:
            (name,) = self._specs
            inputs = {name: next(iter(inputs.values()))}
        elif self._columns and len(inputs) > 1 and inputs.keys() <= set(self._columns):
            (name,) = self._specs
            inputs = {name: self._joined(name, inputs)}
        adapted = {name: self._converted(name, tensor) for name, tensor in inputs.items()}
        if any(adapted.get(name) is not tensor for name, tensor in request.inputs.items()):
            request.inputs = adapted
            request.form = None  # others of this form have to be adapted too

    def _joined(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """One matrix of all columns, each of which is [rows] or [rows, 1]."""
        missing = [column for column in self._columns if column not in inputs]
        if missing:
            raise InvalidArgumentError(f"the inputs lack the columns {', '.join(missing)}")
        texts = [column for column, tensor in inputs.items() if tensor.datatype in _NOT_NUMERIC]
        if texts:
            raise InvalidArgumentError(f"expected numbers in the columns {', '.join(texts)}")
        sizes = {column: tensor.data.size for column, tensor in inputs.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidArgumentError(f"expected columns with one value for each row, got {sizes} values")
        datatype = self._specs[name][0]
        assert datatype is not None, "a validated config names the datatype of every tensor"
        if any(_is_placeholder(tensor) for tensor in inputs.values()):
            return placeholder(name, datatype, (next(iter(sizes.values())), len(self._columns)))
        columns = [inputs[column].data.reshape(-1) for column in self._columns]
        with np.errstate(all="ignore"):
            return Tensor(name, datatype, np.stack(columns, axis=1, dtype=datatype.numpy, casting="unsafe"))

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        datatype, dims = self._specs.get(name, (None, ()))
        data = tensor.data
        if self._is_batched and dims == (1,) and data.ndim == 1:
            data = data[:, None]
        if datatype is None or (datatype is not tensor.datatype and {datatype, tensor.datatype} & _NOT_NUMERIC):
            datatype = tensor.datatype
        elif datatype is not tensor.datatype and _is_placeholder(tensor):
            return placeholder(name, datatype, data.shape)
        elif datatype is not tensor.datatype:
            with np.errstate(all="ignore"):
                data = data.astype(datatype.numpy)
        if data is tensor.data and name == tensor.name:
            return tensor
        return Tensor(name, datatype, data)


def _is_placeholder(tensor: Tensor) -> bool:
    """Whether the tensor has only a shape, possibly a large one, and no elements yet."""
    return tensor.data.size > 1 and not any(tensor.data.strides)


def _read_columns(config: ModelConfig) -> tuple[str, ...]:
    """Raises ConfigError for a parameter that is not a list of names."""
    text = config.parameters.get(INPUT_COLUMNS, "[]")
    try:
        columns = json.loads(text)
    except ValueError:
        columns = None
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ConfigError(f"parameter {INPUT_COLUMNS}: expected a JSON list of names, got '{text}'")
    return tuple(columns)

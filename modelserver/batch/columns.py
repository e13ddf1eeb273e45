"""Columns of a table as inputs of a model, and its outputs as columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a row: its shape has no batch dimension, and -1 for any size."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    is_optional: bool = False

    def array(self, value: Any) -> Array:
        """The value of a column: a number, a text, bytes, lists of them, or either as JSON in a text.

        Raises InvalidArgumentError.
        """
        try:
            return self._fit(self._texts(value) if self.datatype is Datatype.BYTES else self._numbers(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"input '{self.name}': {self.datatype.value} expected: {error}") from None

    def _numbers(self, value: Any) -> Array:
        if isinstance(value, str):
            value = orjson.loads(value)
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"got {value!r:.60}")
        if self.datatype is Datatype.BF16:
            return (array.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if array.dtype.kind == "f" and self.datatype.numpy.kind in "biu":
            raise ValueError(f"got {value!r:.60}")
        if array.dtype.kind == "b" or self.datatype.numpy.kind == "f":
            return array.astype(self.datatype.numpy)
        return np.asarray(value, self.datatype.numpy)  # which refuses whole numbers that do not fit

    def _texts(self, value: Any) -> Array:
        if isinstance(value, str) and value.startswith("[") and math.prod(self.shape) != 1:
            value = orjson.loads(value)
        array = np.asarray(value, object)
        flat = [one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist()]
        made = np.empty(len(flat), object)
        made[:] = flat
        return made.reshape(array.shape)

    def _fit(self, array: Array) -> Array:
        shape = self.shape
        if array.shape == shape:
            return array
        if len(array.shape) == len(shape) and all(
            size in (-1, found) for size, found in zip(shape, array.shape, strict=True)
        ):
            return array
        known = math.prod(size for size in shape if size >= 0)
        if shape.count(-1) <= 1 and known and array.size % known == 0 and (-1 in shape or array.size == known):
            return array.reshape(shape)
        raise ValueError(f"shape {list(shape)} expected, got {list(array.shape)}")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as a batch sees it; with a `max_batch_size` requests have a dimension of rows in front."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int

    @property
    def is_batched(self) -> bool:
        return self.max_batch_size > 0

    @classmethod
    def of(cls, version: str, config: Mapping[str, Any]) -> ModelShape:
        """Of the JSON form of a model's config."""
        return cls(
            config["name"],
            version,
            tuple(map(_spec, config["input"])),
            tuple(map(_spec, config["output"])),
            int(config.get("max_batch_size") or 0),
        )

    def document(self) -> dict[str, Any]:
        """What tells whether a model is another one."""
        return {
            "name": self.name,
            "version": self.version,
            "inputs": [[spec.name, spec.datatype.value, list(spec.shape)] for spec in self.inputs],
            "outputs": [[spec.name, spec.datatype.value, list(spec.shape)] for spec in self.outputs],
        }


def _spec(entry: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(int(size) for size in entry["dims"])
    return TensorSpec(entry["name"], Datatype.from_config_name(entry["data_type"]), shape, bool(entry.get("optional")))


class ColumnMap:
    """Which column is which input, and which output is which column."""

    def __init__(
        self, model: ModelShape, pairs: Sequence[str], *, dropped: Sequence[str] = (), binary: Sequence[str] = ()
    ) -> None:
        """`pairs` are `column=input` and `output=column`. Raises InvalidArgumentError."""
        self.model = model
        self._dropped = frozenset(dropped)
        self._inputs = {spec.name: spec.name for spec in model.inputs}
        self._outputs = {spec.name: spec.name for spec in model.outputs}
        for pair in pairs:
            left, equals, right = pair.partition("=")
            if equals and right in self._inputs:
                self._inputs[right] = left
            elif equals and left in self._outputs:
                self._outputs[left] = right
            else:
                raise InvalidArgumentError(
                    f"--map expects COLUMN=INPUT or OUTPUT=COLUMN, got '{pair}'; the model has the inputs "
                    f"{', '.join(self._inputs)} and the outputs {', '.join(self._outputs)}"
                )
        if unknown := set(binary) - set(self._outputs.values()):
            raise InvalidArgumentError(f"--binary names '{min(unknown)}', expected a column of an output")
        self._binary = frozenset(binary)

    @property
    def types(self) -> dict[str, Any]:
        """The types of the columns of outputs: a NumPy datatype, `bytes` or `str`."""
        return {self._outputs[spec.name]: self._type(spec) for spec in self.model.outputs}

    def _type(self, spec: TensorSpec) -> Any:
        if spec.datatype is Datatype.BYTES:
            return bytes if self._outputs[spec.name] in self._binary else str
        if spec.datatype in (Datatype.BF16, Datatype.FP16):
            return np.dtype(np.float32)
        return spec.datatype.numpy

    def check(self, columns: Mapping[str, Any]) -> None:
        """Compare with the columns of a file. Raises InvalidArgumentError."""
        for spec in self.model.inputs:
            column = self._inputs[spec.name]
            if column not in columns and not spec.is_optional:
                raise InvalidArgumentError(
                    f"the model has the input '{spec.name}', and there is no column '{column}': say which one it is by "
                    f"--map COLUMN={spec.name} (there are {', '.join(columns)})"
                )
        kept = set(columns) - self._dropped
        if both := kept & set(self._outputs.values()):
            name = min(both)
            raise InvalidArgumentError(
                f"'{name}' is a column of the input and of an output: rename the output by --map {name}=COLUMN, or "
                f"leave the column out by --drop {name}"
            )

    def inputs_of(self, columns: Mapping[str, Any]) -> dict[str, Array]:
        """The inputs of one row. Raises InvalidArgumentError."""
        found = {}
        for spec in self.model.inputs:
            value = columns.get(self._inputs[spec.name])
            if value is None:
                if spec.is_optional:
                    continue
                raise InvalidArgumentError(f"input '{spec.name}': column '{self._inputs[spec.name]}' has no value")
            found[spec.name] = spec.array(value)
        return found

    def tensors(self, rows: Sequence[Mapping[str, Array]]) -> list[Tensor]:
        """One request of rows, whose inputs have equal shapes; of one row, if the model has no batch dimension."""
        datatypes = {spec.name: spec.datatype for spec in self.model.inputs}
        if not self.model.is_batched:
            return [Tensor(name, datatypes[name], array) for name, array in rows[0].items()]
        return [Tensor(name, datatypes[name], np.stack([row[name] for row in rows])) for name in rows[0]]

    def outputs_of(self, tensors: Sequence[Tensor], num_rows: int) -> list[dict[str, Any]]:
        """The columns of the rows' outputs. Raises InvalidArgumentError for outputs that do not fit the rows."""
        rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
        shapes = {spec.name: spec.shape for spec in self.model.outputs}
        for tensor in tensors:
            if self.model.is_batched and tensor.shape[:1] != (num_rows,):
                raise InvalidArgumentError(f"output '{tensor.name}' has shape {list(tensor.shape)} for {num_rows} rows")
            column = self._outputs.get(tensor.name, tensor.name)
            data = _readable(tensor)
            is_scalar = all(size == 1 for size in shapes.get(tensor.name, (-1,)))
            for row, part in zip(rows, data if self.model.is_batched else [data], strict=True):
                row[column] = self._value(tensor, column, part, is_scalar=is_scalar)
        return rows

    def _value(self, tensor: Tensor, column: str, part: Any, *, is_scalar: bool) -> Any:
        array = np.asarray(part)
        if tensor.datatype is not Datatype.BYTES:
            return array.reshape(()) if is_scalar and array.size == 1 else array
        values = array.tolist()
        if column not in self._binary:
            try:
                values = _texts(values)
            except UnicodeDecodeError:
                raise InvalidArgumentError(
                    f"output '{tensor.name}' is not text: --binary {column} writes it as bytes"
                ) from None
        while is_scalar and isinstance(values, list) and len(values) == 1:
            values = values[0]
        return values

    def kept(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of the input that the output has, too."""
        return {name: value for name, value in columns.items() if name not in self._dropped}


def _texts(values: Any) -> Any:
    return [_texts(one) for one in values] if isinstance(values, list) else values.decode()


def _readable(tensor: Tensor) -> Array:
    """FP16 and BF16 as FP32."""
    if tensor.datatype is Datatype.BF16:
        return (tensor.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return tensor.data.astype(np.float32) if tensor.datatype is Datatype.FP16 else tensor.data

"""The request check of a model, precomputed from its config and shared by both protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelserver.config.lenient_inputs import LenientInputs
from modelserver.config.schema import ModelConfig
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]
Reshape = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output as a client sees it; `dims` has no batch dimension, -1 is any size.

    `reshape` is the shape that the backend sees in place of `dims` (None: the same). `is_shape`: it is a shape tensor,
    whose values are sizes of the whole batch, so that it has no batch dimension in a request either.
    """

    name: str
    datatype: Datatype
    dims: Shape
    reshape: Shape | None = None
    is_optional: bool = False
    is_shape: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether every dimension has a size."""
        return -1 not in self.dims


class ModelSignature:
    """Checks requests against a model's config before a scheduler may see them."""

    def __init__(self, config: ModelConfig) -> None:
        self.model_name = config.name
        self.max_batch_size = config.max_batch_size
        self.has_sequences = config.sequence_batching is not None
        self.is_decoupled = config.is_decoupled
        # The model takes and gives any tensors, and declares none.
        self.is_open = is_open(config)
        self.inputs = {
            spec.name: TensorSpec(
                spec.name,
                _known(spec.data_type),
                tuple(spec.dims),
                None if spec.reshape is None else tuple(spec.reshape.shape),
                spec.optional,
                spec.is_shape_tensor,
            )
            for spec in config.input
        }
        self.outputs = {
            spec.name: TensorSpec(
                spec.name,
                _known(spec.data_type),
                tuple(spec.dims),
                None if spec.reshape is None else tuple(spec.reshape.shape),
            )
            for spec in config.output
        }
        self._lenient = LenientInputs.of(config)
        self._shapes = frozenset(name for name, spec in self.inputs.items() if spec.is_shape)
        self._required = frozenset(name for name, spec in self.inputs.items() if not spec.is_optional)
        # The positions and sizes of an input's fixed dimensions; the other dimensions may have any size.
        self._fixed = {
            name: tuple((position, dim) for position, dim in enumerate(spec.dims) if dim != -1)
            for name, spec in self.inputs.items()
        }

    @property
    def is_lenient(self) -> bool:
        """Whether inputs may be renamed, converted or joined."""
        return self._lenient is not None

    def check(self, request: InFlightRequest) -> None:
        """Raise InvalidArgumentError for a request that the model does not accept; set `request.rows`.

        A lenient model's request gets the inputs of the config first.

        Of several mistakes the error names the one that Triton names: outputs come first.
        """
        if self.is_open:
            request.rows = 1
            return
        if request.outputs is not None:
            request.outputs = self._checked_outputs(request.outputs)
        if self._lenient is not None:
            self._lenient.adapt(request)
        inputs = request.inputs
        if inputs.keys() != self._required:
            self._check_names(inputs)
        rows: int | None = None
        for name, tensor in inputs.items():
            spec = self.inputs[name]
            shape = tensor.data.shape
            if tensor.datatype is not spec.datatype:
                raise InvalidArgumentError(
                    f"inference input '{name}' data-type is '{tensor.datatype.value}', "
                    f"but model '{self.model_name}' expects '{spec.datatype.value}'"
                )
            if self.max_batch_size > 0 and name not in self._shapes:
                if not shape:
                    raise self._no_shape_error(name)
                if rows is None:
                    rows = shape[0]
                elif rows != shape[0]:
                    raise self._batch_mismatch(inputs)
                item_shape = shape[1:]
            else:
                item_shape = shape
            if item_shape != spec.dims and (len(item_shape) != len(spec.dims) or not self._has_fixed(name, item_shape)):
                raise self._shape_error(spec, shape)
        request.rows = self._check_rows(rows)

    def _has_fixed(self, name: str, item_shape: Shape) -> bool:
        for position, dim in self._fixed[name]:  # noqa: SIM110  # a generator would cost more than the comparison
            if item_shape[position] != dim:
                return False
        return True

    def _check_rows(self, rows: int | None) -> int:
        if rows is None:
            return 1
        if rows < 1:
            raise InvalidArgumentError(
                f"inference request batch-size must be at least 1 for '{self.model_name}', got {rows}"
            )
        if rows > self.max_batch_size:
            raise InvalidArgumentError(
                f"inference request batch-size must be <= {self.max_batch_size} for '{self.model_name}', got {rows}"
            )
        return rows

    def _check_names(self, inputs: dict[str, Tensor]) -> None:
        for name in inputs:
            if name not in self.inputs:
                raise InvalidArgumentError(
                    f"unexpected inference input '{name}' for model '{self.model_name}', "
                    f"expected one of {sorted(self.inputs)}"
                )
        missing = sorted(self._required - inputs.keys())
        if missing:
            most = len(self.inputs)
            expected = f"expected {most} inputs"
            if len(self._required) != most:
                expected = f"expected number of inputs between {len(self._required)} and {most}"
            raise InvalidArgumentError(
                f"{expected} but got {len(inputs)} inputs for model '{self.model_name}'. "
                f"Got input(s) {_names(sorted(inputs))}, but missing required input(s) {_names(missing)}. "
                "Please provide all required input(s)."
            )

    def _checked_outputs(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The outputs, each once."""
        for name in names:
            if name not in self.outputs:
                raise InvalidArgumentError(
                    f"unexpected inference output '{name}' for model '{self.model_name}', "
                    f"expected one of {sorted(self.outputs)}"
                )
        return names if len(set(names)) == len(names) else tuple(dict.fromkeys(names))

    def _no_shape_error(self, name: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"input '{name}' has no shape but model requires batch dimension for '{self.model_name}', whose "
            f"max_batch_size is {self.max_batch_size}: make the first dimension the batch size"
        )

    def _shape_error(self, spec: TensorSpec, shape: Shape) -> InvalidArgumentError:
        batched = self.max_batch_size > 0 and not spec.is_shape
        expected = ([-1] if batched else []) + list(spec.dims)
        hint = (
            " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
            f"to each input shape; max_batch_size is {self.max_batch_size}."
            if batched
            else ""
        )
        return InvalidArgumentError(
            f"unexpected shape for input '{spec.name}' for model '{self.model_name}'. "
            f"Expected {_sizes(expected)}, got {_sizes(shape)}.{hint}"
        )

    def _batch_mismatch(self, inputs: dict[str, Tensor]) -> InvalidArgumentError:
        batched = {name: tensor for name, tensor in inputs.items() if name not in self._shapes}
        sizes = {name: tensor.data.shape[0] if tensor.data.ndim else None for name, tensor in batched.items()}
        first = next(iter(sizes.values()))
        odd = next(name for name, size in sizes.items() if size != first)
        return InvalidArgumentError(
            f"input '{odd}' batch size does not match other inputs for '{self.model_name}': {sizes}; "
            "the first dimension must be the same for all inputs"
        )


def _names(names: list[str]) -> str:
    """A list of names as Triton writes it."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _sizes(shape: Sequence[int]) -> str:
    """A shape as Triton writes it."""
    return f"[{','.join(map(str, shape))}]"


def _known(datatype: Datatype | None) -> Datatype:
    assert datatype is not None, "a validated config names the datatype of every tensor"
    return datatype


def reshaper(source: Shape, target: Shape, *, is_batched: bool) -> Reshape:
    """From arrays of shape `source` to `target`, behind the batch dimension; variable sizes correspond in order."""
    num_leading = 1 if is_batched else 0
    if -1 not in target:
        return lambda array: array.reshape(array.shape[:num_leading] + target)
    variable = [position + num_leading for position, dim in enumerate(source) if dim == -1]

    def fill(array: Array) -> Array:
        sizes = iter([array.shape[position] for position in variable if position < array.ndim])
        return array.reshape(array.shape[:num_leading] + tuple(next(sizes) if dim == -1 else dim for dim in target))

    return fill


# Models that declare no tensors: they take any inputs and give any outputs, and check them themselves.
#
# Their config has the parameter `open_signature`, no inputs and outputs, and no batches. A prediction by KServe's first
# protocol is one document: the BYTES input `request` in, the BYTES output `response` out, with the parameter `v1` set.

OPEN_SIGNATURE = "open_signature"
DOCUMENT, ANSWER = "request", "response"
# The parameter of a request whose document is one of the first protocol.
V1 = "v1"


def is_open(config: ModelConfig) -> bool:
    """Whether the model takes and gives what it likes."""
    is_asked = config.parameters.get(OPEN_SIGNATURE, "").strip().lower() == "true"
    return is_asked and not (config.input or config.output or config.max_batch_size)

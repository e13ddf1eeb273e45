"""The inputs and outputs of an engine, in plain data: the base of every decision that needs no GPU.

`from_engine` asks a loaded engine, which needs a GPU; a sidecar, the JSON file beside a plan, holds the same. Dims are
those of the engine, with the batch dimension; -1 is variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from modelserver.backend import Datatype, InvalidArgumentError, UnsupportedError

Shape = tuple[int, ...]

# trt.DataType by name. FP8, INT4, FP4 and E8M0 have no datatype on the wire.
DATATYPES = {
    "FLOAT": Datatype.FP32,
    "HALF": Datatype.FP16,
    "BF16": Datatype.BF16,
    "INT8": Datatype.INT8,
    "UINT8": Datatype.UINT8,
    "INT32": Datatype.INT32,
    "INT64": Datatype.INT64,
    "BOOL": Datatype.BOOL,
}
SIDECAR_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest, optimal and largest shape of an input in a profile; of a shape tensor, its values."""

    min: Shape
    opt: Shape
    max: Shape

    def contains(self, shape: Shape) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def distance(self, shape: Shape) -> int:
        """Manhattan distance from the optimal shape, which is what the engine was tuned for."""
        return sum(abs(size - best) for size, best in zip(shape, self.opt, strict=True))


@dataclass(frozen=True, slots=True)
class IoTensor:
    """One input or output. A shape tensor's values are sizes: the engine reads them on the host."""

    name: str
    is_input: bool
    datatype: Datatype
    dims: Shape
    is_shape_tensor: bool = False
    is_linear: bool = True


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine. `profiles` are its optimisation profiles, each a range for every input."""

    tensors: tuple[IoTensor, ...]
    profiles: tuple[Mapping[str, Range], ...]

    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.is_input)

    @property
    def outputs(self) -> tuple[IoTensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_input)

    @property
    def has_shape_tensors(self) -> bool:
        return any(tensor.is_shape_tensor for tensor in self.tensors)

    @property
    def can_batch(self) -> bool:
        """Whether the first dimension of everything may be any size, as far as its inputs tell."""
        return all(tensor.is_shape_tensor or tensor.dims[:1] == (-1,) for tensor in self.inputs)

    def largest_batch(self, profiles: Sequence[int] = ()) -> int:
        """The most rows that one of these profiles takes (none: of the first); 0 if the engine has no batch at all.

        Of a profile it is the smallest first dimension that the inputs may have, and the first value of shape tensors.
        """
        return max((self._largest_batch(self.profiles[index]) for index in profiles or (0,)), default=0)

    def _largest_batch(self, profile: Mapping[str, Range]) -> int:
        firsts = [profile[tensor.name].max[:1] for tensor in self.inputs]
        if not firsts or not all(firsts):
            return 0
        return min(first[0] for first in firsts)


def from_engine(trt: Any, engine: Any, *, name: str) -> EngineInfo:
    """The truth. Raises UnsupportedError for what the wire cannot carry. `trt` is the library's module."""
    tensors = []
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    for tensor_name in names:
        is_input = engine.get_tensor_mode(tensor_name) == trt.TensorIOMode.INPUT
        type_name = engine.get_tensor_dtype(tensor_name).name
        if type_name not in DATATYPES:
            kind = "input" if is_input else "output"
            raise UnsupportedError(
                f"unsupported datatype TYPE_{type_name} for {kind} '{tensor_name}' for model '{name}': it can be "
                f"{', '.join(DATATYPES)}; export the model with a cast around it"
            )
        dims = tuple(engine.get_tensor_shape(tensor_name))
        # Some are read on the host and have no part in the outputs' shapes.
        is_shape_tensor = bool(engine.is_shape_inference_io(tensor_name)) or _is_on_host(engine, tensor_name)
        if is_shape_tensor and -1 in dims:
            raise UnsupportedError(
                f"'{tensor_name}' of model '{name}' is a shape tensor without a fixed number of values: {list(dims)}"
            )
        is_linear = _is_linear(trt, engine, tensor_name)
        tensors.append(IoTensor(tensor_name, is_input, DATATYPES[type_name], dims, is_shape_tensor, is_linear))
    profiles = tuple(
        {tensor.name: _range(engine, tensor, index) for tensor in tensors if tensor.is_input}
        for index in range(max(1, engine.num_optimization_profiles))
    )
    return EngineInfo(tuple(tensors), profiles)


def _is_on_host(engine: Any, name: str) -> bool:
    return bool(engine.get_tensor_location(name).name == "HOST")


def _is_linear(trt: Any, engine: Any, name: str) -> bool:
    # The lean runtime has no names for formats, and tells only which dimension is vectorised.
    if not hasattr(trt, "TensorFormat"):
        return int(engine.get_tensor_vectorized_dim(name)) == -1
    return bool(engine.get_tensor_format(name) == trt.TensorFormat.LINEAR)


def _range(engine: Any, tensor: IoTensor, profile: int) -> Range:
    if tensor.is_shape_tensor and not engine.is_shape_inference_io(tensor.name):
        # The engine does not say which values are allowed. TensorRT refuses the others when it executes.
        num_values = prod(tensor.dims)
        bounds = ((-(2**63),) * num_values, (0,) * num_values, (2**63 - 1,) * num_values)
    elif tensor.is_shape_tensor:
        # By position: the binding's keyword names are swapped.
        bounds = engine.get_tensor_profile_values(profile, tensor.name)
    elif -1 not in tensor.dims:
        bounds = (tensor.dims,) * 3  # an engine without variable sizes needs no profile, and may have none
    else:
        bounds = engine.get_tensor_profile_shape(tensor.name, profile)
    low, best, high = (tuple(int(size) for size in bound) for bound in bounds)
    return Range(low, best, high)


def to_json(info: EngineInfo) -> dict[str, Any]:
    """As the sidecar has it."""
    return {
        "format": SIDECAR_FORMAT,
        "tensors": [
            {
                "name": tensor.name,
                "mode": "input" if tensor.is_input else "output",
                "datatype": tensor.datatype.value,
                "dims": list(tensor.dims),
                "is_shape_tensor": tensor.is_shape_tensor,
                "is_linear": tensor.is_linear,
            }
            for tensor in info.tensors
        ],
        "profiles": [
            {name: [list(bounds.min), list(bounds.opt), list(bounds.max)] for name, bounds in profile.items()}
            for profile in info.profiles
        ],
    }


def from_json(document: Any, source: object) -> EngineInfo:
    """Raises InvalidArgumentError for a document that is not a sidecar; `source` names it."""
    try:
        if document["format"] != SIDECAR_FORMAT:
            raise ValueError(f"expected format {SIDECAR_FORMAT}, got {document['format']}")
        tensors = tuple(
            IoTensor(
                _checked(entry["name"], str),
                {"input": True, "output": False}[entry["mode"]],
                Datatype(entry["datatype"]),
                _shape(entry["dims"]),
                _checked(entry["is_shape_tensor"], bool),
                _checked(entry["is_linear"], bool),
            )
            for entry in document["tensors"]
        )
        profiles = tuple(
            {name: Range(*(_shape(bound) for bound in bounds)) for name, bounds in profile.items()}
            for profile in document["profiles"]
        )
        info = EngineInfo(tensors, profiles)
        _check_profiles(info)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{source}: expected the description of an engine, as modelserver build-engine writes it, got something "
            f"else ({type(error).__name__}: {error}); delete it, or build the engine again"
        ) from error
    return info


def _check_profiles(info: EngineInfo) -> None:
    if not info.inputs or not info.outputs or not info.profiles:
        raise ValueError("expected an input, an output and a profile")
    for profile in info.profiles:
        for tensor in info.inputs:
            bounds = profile[tensor.name]
            num_sizes = (tensor.dims[0] if tensor.dims else 1) if tensor.is_shape_tensor else len(tensor.dims)
            if not len(bounds.min) == len(bounds.opt) == len(bounds.max) == num_sizes:
                raise ValueError(f"expected {num_sizes} sizes in the bounds of '{tensor.name}'")


def _checked(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _shape(sizes: Any) -> Shape:
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise TypeError(f"expected a list of sizes, got {sizes!r}")
    return tuple(sizes)

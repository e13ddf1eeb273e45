"""A ModelInferRequest without its id and its raw data: clients repeat this part from request to request.

The parameters of responses are encoded here as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from google.protobuf.message import DecodeError

from modelserver.core.datatype import Datatype
from modelserver.core.numerals import is_digits
from modelserver.core.request import InFlightRequest, RegionInput, RegionSlice, Transfer
from modelserver.core.response import ParameterValue
from modelserver.errors import InvalidArgumentError
from modelserver.pb import grpc_service_pb2 as pb

# The limit of NumPy 1.x; 2.x allows 64.
_MAX_DIMENSIONS = 32
# As over HTTP: names go into errors and logs.
MAX_NAME_LEN = 1024
_MAX_TENSOR_BYTES = (1 << 63) - 1
_DATATYPES = {datatype.value: datatype for datatype in Datatype}


@dataclass(frozen=True, slots=True)
class InputHead:
    """An input without its raw data. `num_bytes` is the required size of the raw data, None for BYTES."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    num_bytes: int | None
    contents: pb.InferTensorContents | None


@dataclass(frozen=True, slots=True)
class InferCallHead:
    """An infer call without its raw tensors, checked as far as possible without the data and the model.

    `inputs` are the inputs in the message.
    """

    model_name: str
    version: int | None
    inputs: tuple[InputHead, ...]
    outputs: tuple[str, ...] | None
    parameters: Mapping[str, pb.InferParameter]
    has_contents: bool
    transfer: Transfer | None = None


def read_head(serialized: bytes) -> InferCallHead:
    """The head in a serialized ModelInferRequest that has no raw contents.

    Raises ServerError for every fault in it.
    """
    try:
        wire = pb.ModelInferRequest.FromString(serialized)
    except DecodeError:
        raise InvalidArgumentError("the message is not a serialized inference.ModelInferRequest") from None
    places = [region_slice(f"input '{tensor.name}'", tensor.parameters) for tensor in wire.inputs]
    heads = [_input_head(tensor) for tensor in wire.inputs]
    _check_unique("input", [tensor.name for tensor in heads])
    _check_unique("output", [output.name for output in wire.outputs])
    inputs = tuple(tensor for tensor, place in zip(heads, places, strict=True) if place is None)
    elsewhere = tuple(_region_input(tensor, place) for tensor, place in zip(heads, places, strict=True) if place)
    return InferCallHead(
        wire.model_name,
        decode_version(wire.model_version),
        inputs,
        tuple(output.name for output in wire.outputs) if wire.outputs else None,
        wire.parameters,
        any(tensor.contents is not None for tensor in inputs),
        _transfer(elsewhere, wire.outputs),
    )


# The memo pays because parsing and checking a head takes longer than everything else in a small request.
remembered_head = lru_cache(maxsize=512)(read_head)


def decode_version(version: str) -> int | None:
    """A model version from the wire; None for the empty string, which leaves the choice to the server."""
    if not version:
        return None
    if is_digits(version):
        return int(version)
    raise InvalidArgumentError(f"model version must be a number, or empty for the server's choice; got '{version}'")


def _input_head(tensor: pb.ModelInferRequest.InferInputTensor) -> InputHead:
    name = tensor.name
    if len(name) > MAX_NAME_LEN:
        raise InvalidArgumentError(f"an input's name is longer than {MAX_NAME_LEN} characters: '{name[:40]}...'")
    datatype = _DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise InvalidArgumentError(
            f"input '{name}': unknown datatype '{tensor.datatype}', expected one of {', '.join(_DATATYPES)}"
        )
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise InvalidArgumentError(
            f"input '{name}': {len(tensor.shape)} dimensions, at most {_MAX_DIMENSIONS} are possible"
        )
    shape = tuple(tensor.shape)
    _check_shape(name, datatype, shape)
    num_bytes = None if datatype.itemsize is None else prod(shape) * datatype.itemsize
    return InputHead(name, datatype, shape, num_bytes, tensor.contents if tensor.HasField("contents") else None)


def _check_shape(name: str, datatype: Datatype, shape: tuple[int, ...]) -> None:
    """Refuse shapes that no array can have."""
    if min(shape, default=1) < 0:
        raise InvalidArgumentError(f"input '{name}': shape {list(shape)} has a negative dimension")
    # Zeros are left out: NumPy computes strides of an empty array from its other dimensions.
    if prod(filter(None, shape)) * 8 > _MAX_TENSOR_BYTES:
        raise InvalidArgumentError(f"input '{name}': shape {list(shape)} of {datatype.value} is too large")


def _check_unique(kind: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgumentError(f"{kind} '{name}' already exists in request")
        seen.add(name)


def _region_input(tensor: InputHead, place: RegionSlice) -> RegionInput:
    if tensor.contents is not None:
        raise InvalidArgumentError(
            f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}'"
        )
    return RegionInput(tensor.name, tensor.datatype, tensor.shape, place)


def _transfer(
    inputs: tuple[RegionInput, ...], outputs: Sequence[pb.ModelInferRequest.InferRequestedOutputTensor]
) -> Transfer | None:
    """The tensors that do not travel in the message."""
    placed: dict[str, RegionSlice] = {}
    class_counts: dict[str, int] = {}
    for output in outputs:
        what = f"requested output '{output.name}'"
        count = class_count(what, output.parameters)
        place = region_slice(what, output.parameters)
        if count and place is not None:
            raise InvalidArgumentError(f"output can't set both '{REGION}' and '{CLASSIFICATION}': {what}")
        if count:
            class_counts[output.name] = count
        if place is not None:
            placed[output.name] = place
    return Transfer(inputs, placed, class_counts) if inputs or placed or class_counts else None


# Request parameters: typed values on the wire, reserved keys, and the attributes they set on a request.

# The one key of the `triton_` family that a client may set: it wants decoupled streams to end with an empty response.
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_MAX_UINT64 = (1 << 64) - 1
_UNSIGNED = ("int64_param", "uint64_param")
# Reserved key -> attribute of InFlightRequest and the kinds of value that it may have.
_RESERVED: dict[str, tuple[str, tuple[str, ...]]] = {
    "sequence_id": ("sequence_id", ("int64_param", "uint64_param", "string_param")),
    "sequence_start": ("sequence_start", ("bool_param",)),
    "sequence_end": ("sequence_end", ("bool_param",)),
    "priority": ("priority", _UNSIGNED),
    "timeout": ("timeout_us", _UNSIGNED),
    EMPTY_FINAL_RESPONSE: ("wants_empty_final", ("bool_param",)),
}
# Triton's C++ client sends unsigned values of these keys as int64, so the upper half of the range arrives negative.
_WRAPPED = frozenset({"sequence_id", "timeout"})
REGION = "shared_memory_region"
CLASSIFICATION = "classification"


def apply_parameters(request: InFlightRequest, parameters: Mapping[str, pb.InferParameter]) -> None:
    """Set the attributes that reserved keys stand for; all other parameters go to the model.

    Raises InvalidArgumentError for a parameter without a value, a reserved key with the wrong kind of value, or a key
    that clients may not set.
    """
    free: dict[str, ParameterValue] = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgumentError(f"parameter '{key}' has no value")
        value: ParameterValue = getattr(parameter, kind)
        if key in _RESERVED:
            attribute, kinds = _RESERVED[key]
            setattr(request, attribute, _checked(key, kind, kinds, value))
        elif key.startswith("triton_"):
            raise InvalidArgumentError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL_RESPONSE}; got '{key}'"
            )
        else:
            free[key] = value
    request.parameters = free


def _checked(key: str, kind: str, kinds: tuple[str, ...], value: ParameterValue) -> ParameterValue:
    if kind not in kinds:
        accepted = " or ".join(kinds)
        raise InvalidArgumentError(f"invalid value type for '{key}' parameter, expected {accepted}, got {kind}")
    if isinstance(value, int) and value < 0:
        if key in _WRAPPED:
            return value & _MAX_UINT64
        raise InvalidArgumentError(f"invalid value for '{key}', expected value >= 0, got {value}")
    return value


def region_slice(what: str, parameters: Mapping[str, pb.InferParameter]) -> RegionSlice | None:
    """The region that a tensor is in or goes to, if any; `what` names the tensor.

    Raises InvalidArgumentError. Parameters that mean nothing here are ignored, as in Triton.
    """
    if REGION not in parameters:
        return None
    region = parameters[REGION]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidArgumentError(f"invalid value type for '{REGION}' parameter for {what}, expected string_param")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgumentError(
            f"'shared_memory_byte_size' must be specified along with '{REGION}' parameter for {what}"
        )
    offset = _size(what, parameters, "shared_memory_offset")
    return RegionSlice(region.string_param, offset, _size(what, parameters, "shared_memory_byte_size"))


def class_count(what: str, parameters: Mapping[str, pb.InferParameter]) -> int:
    """How many classes of an output are wanted; 0 if the tensor itself is."""
    return _size(what, parameters, CLASSIFICATION)


def _size(what: str, parameters: Mapping[str, pb.InferParameter], key: str) -> int:
    if key not in parameters:
        return 0
    parameter = parameters[key]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in _UNSIGNED:
        raise InvalidArgumentError(
            f"invalid value type for '{key}' parameter for {what}, expected {' or '.join(_UNSIGNED)}, got {kind}"
        )
    value: int = getattr(parameter, kind)
    if value < 0:
        raise InvalidArgumentError(f"{what}: invalid value for '{key}' parameter, expected 0 or more, got {value}")
    return value


def encode_parameter(value: ParameterValue) -> pb.InferParameter:
    """A typed value for the wire; integers beyond int64 become uint64.

    Raises ValueError for an integer that no field can hold.
    """
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, int):
        return pb.InferParameter(uint64_param=value) if value >= 1 << 63 else pb.InferParameter(int64_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    return pb.InferParameter(string_param=value)


def parameter_fields(parameters: Mapping[str, ParameterValue]) -> bytes:
    """The `parameters` field of a ModelInferResponse, serialized."""
    encoded = {key: encode_parameter(value) for key, value in parameters.items()}
    return pb.ModelInferResponse(parameters=encoded).SerializeToString()

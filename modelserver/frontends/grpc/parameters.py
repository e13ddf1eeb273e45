"""Request parameters: typed values on the wire, reserved keys, and the attributes they set on a request."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.core.request import InFlightRequest, RegionSlice
from modelserver.core.response import ParameterValue
from modelserver.errors import InvalidArgumentError
from modelserver.pb import grpc_service_pb2 as pb

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

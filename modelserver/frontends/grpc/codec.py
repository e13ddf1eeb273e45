"""ModelInferRequest bytes -> InferRequest, InferResponse -> ModelInferResponse bytes.

The only place below which nobody sees protobuf. Small messages go through the generated parser whole;
of large ones the tensors are cut out first (`envelope`), so that they stay views of the received bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from google.protobuf.message import DecodeError

from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.tensor import Buffer, Tensor, tensor_from_bytes, tensor_to_bytes
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError
from modelserver.frontends.grpc import envelope
from modelserver.frontends.grpc.contents import tensor_from_contents
from modelserver.frontends.grpc.parameters import apply_parameters, parameter_fields, refuse_tensor_parameters
from modelserver.frontends.grpc.status import sendable
from modelserver.pb import grpc_service_pb2 as pb

# From here on a copy costs more than walking the message in Python.
_LARGE_BYTES = 32 * 1024
# What NumPy 1.x can hold; 2.x could do 64.
_MAX_DIMENSIONS = 32
_MAX_TENSOR_BYTES = (1 << 63) - 1

# Serialized `parameters` entries; fields of a message may come in any order, so they simply follow the others.
_IS_FINAL = parameter_fields({"triton_final_response": True})
_IS_NOT_FINAL = parameter_fields({"triton_final_response": False})

_DATATYPES = {datatype.value: datatype for datatype in Datatype}


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Bounds of the gRPC frontend; message sizes are the wire's.

    `max_stream_inflight` requests of one ModelStreamInfer call are in flight before it reads no further.
    """

    max_tensors: int = 1024
    max_stream_inflight: int = 256


DEFAULT_LIMITS = GrpcLimits()


def decode_infer_request(message: Buffer, limits: GrpcLimits = DEFAULT_LIMITS) -> InferRequest:
    """The request in a serialized ModelInferRequest. Raises ServerError for everything that is wrong with it."""
    wire, raws = _parse(message)
    tensors = wire.inputs
    if len(tensors) > limits.max_tensors:
        raise PayloadTooLargeError(f"the request has {len(tensors)} inputs, at most {limits.max_tensors} are allowed")
    request = InferRequest(
        wire.model_name,
        decode_version(wire.model_version),
        _raw_inputs(tensors, raws) if raws else _typed_inputs(tensors),
        wire.id,
    )
    if wire.outputs:
        request.outputs = _requested_outputs(wire.outputs, limits)
    if wire.parameters:
        apply_parameters(request, wire.parameters)
    return request


def decode_version(version: str) -> int | None:
    """A model version from the wire; None for the empty string, which leaves the choice to the server."""
    if not version:
        return None
    if version.isascii() and version.isdigit() and len(version) < 19:
        return int(version)
    raise InvalidArgumentError(f"model version must be a number, or empty for the server's choice; got '{version}'")


def request_id(message: Buffer) -> str:
    """The id of a request that could not be decoded, as far as one can be found."""
    try:
        return _parse(message)[0].id
    except ServerError:
        return ""


def encode_infer_response(request: InferRequest, response: InferResponse) -> bytes:
    """A serialized ModelInferResponse, tensors as raw_output_contents. The response must not be an error."""
    return b"".join(_response_parts(request, response.outputs, response.parameters))


def encode_stream_response(request: InferRequest, response: InferResponse) -> bytes:
    """A serialized ModelStreamInferResponse, with the parameter that tells whether more will follow."""
    parts = _response_parts(request, response.outputs, response.parameters)
    parts.append(_IS_FINAL if response.is_final else _IS_NOT_FINAL)
    return b"".join((envelope.infer_response_head(sum(map(len, parts))), *parts))


def encode_stream_error(request_id: str, error: ServerError) -> bytes:
    """A serialized ModelStreamInferResponse for a request that failed; the stream stays open."""
    response = pb.ModelInferResponse(id=request_id)
    response.parameters["triton_final_response"].bool_param = True
    # Clients take an empty message for success.
    message = sendable(error.message) or error.code.value
    return pb.ModelStreamInferResponse(error_message=message, infer_response=response).SerializeToString()


def _parse(message: Buffer) -> tuple[pb.ModelInferRequest, Sequence[Buffer]]:
    try:
        if len(message) >= _LARGE_BYTES:
            with suppress(envelope.MalformedError):
                rest, raws = envelope.split_raw_contents(message)
                return pb.ModelInferRequest.FromString(rest), raws
        wire = pb.ModelInferRequest.FromString(message)  # type: ignore[arg-type]  # it takes any buffer
    except DecodeError:
        raise InvalidArgumentError("the message is not a serialized inference.ModelInferRequest") from None
    return wire, wire.raw_input_contents


def _raw_inputs(tensors: Sequence[pb.ModelInferRequest.InferInputTensor], raws: Sequence[Buffer]) -> dict[str, Tensor]:
    """Inputs whose bytes are in raw_input_contents, by position."""
    if len(raws) != len(tensors):
        raise _raw_count_mismatch(tensors, len(raws))
    inputs: dict[str, Tensor] = {}
    for tensor, raw in zip(tensors, raws, strict=True):
        name = tensor.name
        if tensor.parameters:
            refuse_tensor_parameters(f"input '{name}'", tensor.parameters)
        if tensor.HasField("contents"):
            raise InvalidArgumentError(
                f"contents field must not be specified when using raw_input_contents for input '{name}'"
            )
        datatype = _DATATYPES.get(tensor.datatype) or _datatype(name, tensor.datatype)
        shape = tuple(tensor.shape)
        _check_shape(name, datatype, shape)
        decoded = tensor_from_bytes(name, datatype, shape, raw)
        # A view into a large message may start anywhere; kernels expect whole elements on their boundaries.
        if not decoded.data.flags.aligned:
            decoded.data = decoded.data.copy()
        inputs[name] = decoded
    if len(inputs) != len(tensors):
        raise _duplicate_input(tensors)
    return inputs


def _typed_inputs(tensors: Sequence[pb.ModelInferRequest.InferInputTensor]) -> dict[str, Tensor]:
    """Inputs whose elements are in each tensor's own `contents`."""
    inputs: dict[str, Tensor] = {}
    for tensor in tensors:
        name = tensor.name
        refuse_tensor_parameters(f"input '{name}'", tensor.parameters)
        if not tensor.HasField("contents"):
            raise InvalidArgumentError(
                f"unable to find data for input '{name}': send it in raw_input_contents or in its contents"
            )
        datatype = _datatype(name, tensor.datatype)
        shape = tuple(tensor.shape)
        _check_shape(name, datatype, shape)
        inputs[name] = tensor_from_contents(name, datatype, shape, tensor.contents)
    if len(inputs) != len(tensors):
        raise _duplicate_input(tensors)
    return inputs


def _requested_outputs(
    outputs: Sequence[pb.ModelInferRequest.InferRequestedOutputTensor], limits: GrpcLimits
) -> tuple[str, ...]:
    if len(outputs) > limits.max_tensors:
        raise PayloadTooLargeError(
            f"the request names {len(outputs)} outputs, at most {limits.max_tensors} are allowed"
        )
    names = []
    for output in outputs:
        if output.parameters:
            refuse_tensor_parameters(f"requested output '{output.name}'", output.parameters)
        names.append(output.name)
    return tuple(names)


def _datatype(name: str, wire_name: str) -> Datatype:
    datatype = _DATATYPES.get(wire_name)
    if datatype is None:
        raise InvalidArgumentError(
            f"input '{name}': unknown datatype '{wire_name}', expected one of {', '.join(_DATATYPES)}"
        )
    return datatype


def _check_shape(name: str, datatype: Datatype, shape: tuple[int, ...]) -> None:
    """Refuse shapes that no array can have, before anything is computed from them."""
    if len(shape) > _MAX_DIMENSIONS:
        raise InvalidArgumentError(f"input '{name}': {len(shape)} dimensions, at most {_MAX_DIMENSIONS} are possible")
    if min(shape, default=1) < 0:
        raise InvalidArgumentError(f"input '{name}': shape {list(shape)} has a negative dimension")
    # Zeros are left out: NumPy computes strides of an empty array from its other dimensions.
    if prod(shape) * 8 > _MAX_TENSOR_BYTES or (0 in shape and prod(filter(None, shape)) * 8 > _MAX_TENSOR_BYTES):
        raise InvalidArgumentError(f"input '{name}': shape {list(shape)} of {datatype.value} is too large")


def _raw_count_mismatch(tensors: Sequence[pb.ModelInferRequest.InferInputTensor], num_raws: int) -> ServerError:
    for tensor in tensors:
        refuse_tensor_parameters(f"input '{tensor.name}'", tensor.parameters)
    missing = [tensor.name for tensor in tensors[num_raws:]]
    hint = f"; unable to find data for {', '.join(map(repr, missing))}" if missing else ""
    return InvalidArgumentError(
        f"expected {len(tensors)} entries in raw_input_contents, one for each input, got {num_raws}{hint}"
    )


def _duplicate_input(tensors: Sequence[pb.ModelInferRequest.InferInputTensor]) -> ServerError:
    names = [tensor.name for tensor in tensors]
    repeated = next(name for name in names if names.count(name) > 1)
    return InvalidArgumentError(f"input '{repeated}' already exists in request")


def _response_parts(
    request: InferRequest, outputs: Sequence[Tensor], parameters: Mapping[str, ParameterValue] | None
) -> list[Buffer]:
    """The fields of a ModelInferResponse, in the order of their numbers; large tensors are views."""
    version = "" if request.version is None else str(request.version)
    parts: list[Buffer] = [envelope.model_fields(request.model_name, version)]
    if request.id:
        encoded_id = request.id.encode()
        parts += (b"\x1a", envelope.varint(len(encoded_id)), encoded_id)
    if parameters:
        parts.append(parameter_fields(parameters))
    raws: list[Buffer] = []
    for output in outputs:
        data = output.data
        parts.append(envelope.output_field(output.name, output.datatype.value, data.shape))
        raw = data.tobytes() if data.nbytes < 1024 and data.dtype.kind != "O" else tensor_to_bytes(output)
        raws += (envelope.raw_output_head(len(raw)), raw)
    parts += raws
    return parts

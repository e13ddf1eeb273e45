"""ModelInferRequest bytes -> InFlightRequest, InferResponse -> ModelInferResponse bytes.

Layers below this one do not see protobuf. `envelope` takes a request apart, so that tensors stay views of the received
bytes; `head` reads the fields before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from modelserver.core.long_work import Slices
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.template import VIEW_BYTES
from modelserver.core.tensor import (
    Buffer,
    Tensor,
    bytes_element_slices,
    placeholder,
    tensor_from_bytes,
    tensor_to_bytes,
)
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError
from modelserver.frontends.grpc import envelope
from modelserver.frontends.grpc.contents import tensor_from_contents, tensor_slices
from modelserver.frontends.grpc.head import (
    REGION,
    InferCallHead,
    InputHead,
    apply_parameters,
    parameter_fields,
    read_head,
    remembered_head,
)
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.grpc_status import sendable
from modelserver.protocol.limits import DEFAULT_GRPC_LIMITS, GrpcLimits

# Heads up to this size are remembered; parameters make a head vary from request to request.
_REMEMBERED_BYTES = 1024
# BYTES elements take up to 10 ms/MB.
_MAX_ELEMENT_BYTES_ON_LOOP = 128 * 1024
# The most bytes of a long request, besides its tensors' data, that are parsed at once, and the most fields of all its
# tensors.
_MAX_HEAD_BYTES = 4 * 1024 * 1024
_MAX_TENSOR_FIELDS = 1 << 15
# An id goes into answers, logs and traces.
_MAX_ID_BYTES = 64 * 1024
_REGION = REGION.encode()
_MALFORMED = "the message is not a serialized inference.ModelInferRequest"

# Serialized `parameters` entries; fields of a message may come in any order, so they simply follow the others.
_IS_FINAL = parameter_fields({"triton_final_response": True})
_IS_NOT_FINAL = parameter_fields({"triton_final_response": False})


# Called with a message, its head without the id, and the parsed head.
Learn = Callable[[Buffer, bytes, InferCallHead], None]


@dataclass(frozen=True, slots=True)
class LongRequest:
    """A request whose head alone takes long to decode. Nothing of it was parsed."""

    split: envelope.SplitRequest


@dataclass(frozen=True, slots=True)
class Outline:
    """A request whose elements take long to decode. The inputs of `request` have shapes but no content."""

    request: InFlightRequest
    head: InferCallHead
    raws: Sequence[Buffer]
    # Of each input that has contents.
    contents: Sequence[Sequence[memoryview]] = ()


def decode_on_loop(
    message: Buffer, limits: GrpcLimits, *, learn: Learn | None = None
) -> InFlightRequest | Outline | LongRequest:
    """The request in a serialized ModelInferRequest, as far as that does not block the event loop for long.

    Raises ServerError for every fault in it. `outline_slices` and `element_slices` do the rest. `learn` is called with
    a request that a client may repeat with other contents.
    """
    split = _split(message, limits)
    if split.pieces:
        return LongRequest(split)
    # A parameter of a tensor takes more than a byte of the head.
    if split.num_parameters or len(split.head) > limits.max_parameters:
        _check_parameters(split, limits)
    raws = split.raws
    # A head without raw contents is remembered if shared memory has them; else it has the contents itself.
    is_alike = raws or _REGION in split.head
    if limits.recognizes and is_alike and not split.num_parameters and len(split.head) <= _REMEMBERED_BYTES:
        head = remembered_head(split.head)
    else:
        head = read_head(split.head)
    _check_tensors(head, limits)
    is_long = bool(raws) and _num_element_bytes(head, raws) > _MAX_ELEMENT_BYTES_ON_LOOP
    if is_long:
        inputs = {item.name: placeholder(item.name, item.datatype, item.shape) for item in head.inputs}
    else:
        inputs = _raw_inputs(head, raws) if raws else _typed_inputs(head)
    request = InFlightRequest(
        model_name=head.model_name, version=head.version, inputs=inputs, id=_decode_id(split.id), outputs=head.outputs
    )
    request.transfer = head.transfer
    if split.num_parameters:
        apply_parameters(request, head.parameters)
    elif raws and learn is not None and head.transfer is None and not is_long:
        learn(message, split.head, head)
    return Outline(request, head, raws) if is_long else request


def outline_slices(long: LongRequest, limits: GrpcLimits) -> Slices[Outline]:
    """The outline of a request with a long head, in slices. Raises ServerError for every fault in it."""
    split = long.split
    if split.num_parameters > limits.max_parameters:
        raise InvalidArgumentError(f"the request has more than {limits.max_parameters} parameters")
    try:
        yield from envelope.tensor_field_slices(split.pieces, limits.max_parameters, _MAX_TENSOR_FIELDS)
        parts, contents = yield from envelope.cut_contents(split.pieces)
    except envelope.MalformedError:
        raise InvalidArgumentError(_MALFORMED) from None
    except envelope.TooManyFieldsError as error:
        raise _too_many_fields(error, limits) from None
    num_bytes = sum(map(len, parts))
    if num_bytes > _MAX_HEAD_BYTES:
        raise PayloadTooLargeError(
            f"the request has {num_bytes} bytes besides its tensors, at most {_MAX_HEAD_BYTES} are allowed"
        )
    head = read_head(b"".join(parts))
    yield
    _check_tensors(head, limits)
    inputs = {item.name: placeholder(item.name, item.datatype, item.shape) for item in head.inputs}
    request = InFlightRequest(
        model_name=head.model_name, version=head.version, inputs=inputs, id=_decode_id(split.id), outputs=head.outputs
    )
    request.transfer = head.transfer
    if split.num_parameters:
        apply_parameters(request, head.parameters)
    return Outline(request, head, split.raws, [views for views in contents if views])


def _check_tensors(head: InferCallHead, limits: GrpcLimits) -> None:
    if len(head.inputs) > limits.max_tensors or (head.outputs and len(head.outputs) > limits.max_tensors):
        raise _too_many(head, limits)


def element_slices(outline: Outline) -> Slices[InFlightRequest]:
    """The whole request, in slices. Raises ServerError for every fault in it."""
    request, head, raws = outline.request, outline.head, outline.raws
    if not raws:
        request.inputs = yield from _content_slices(outline)
        return request
    if head.has_contents or len(raws) != len(head.inputs):
        raise _unusable_raws(head, len(raws))
    inputs: dict[str, Tensor] = {}
    for item, raw in zip(head.inputs, raws, strict=True):
        if item.num_bytes is None:
            elements = yield from bytes_element_slices(item.name, item.shape, raw)
            inputs[item.name] = Tensor(item.name, item.datatype, elements)
        else:
            inputs[item.name] = _raw_input(item, raw)
    request.inputs = inputs
    return request


def _content_slices(outline: Outline) -> Slices[dict[str, Tensor]]:
    inputs: dict[str, Tensor] = {}
    contents = iter(outline.contents)
    try:
        for item in outline.head.inputs:
            if item.contents is None:
                inputs[item.name] = _typed_input(item)  # which reports that there are none
            else:
                shape = item.shape
                inputs[item.name] = yield from tensor_slices(item.name, item.datatype, shape, next(contents))
    except envelope.MalformedError:
        raise InvalidArgumentError(_MALFORMED) from None
    return inputs


def _num_element_bytes(head: InferCallHead, raws: Sequence[Buffer]) -> int:
    """Bytes that are split into elements."""
    return sum(len(raw) for item, raw in zip(head.inputs, raws, strict=False) if item.num_bytes is None)


def request_id(message: Buffer, limits: GrpcLimits = DEFAULT_GRPC_LIMITS) -> str:
    """The id of a request that could not be decoded, if it can be found."""
    try:
        return known_id(_split(message, limits))
    except ServerError:
        return ""


def known_id(split: envelope.SplitRequest) -> str:
    """The id of a request, or nothing if it has none that can be read."""
    try:
        return _decode_id(split.id)
    except ServerError:
        return ""


def request_names(message: Buffer, limits: GrpcLimits = DEFAULT_GRPC_LIMITS) -> tuple[str, str]:
    """The model and the id of a request that could not be decoded, if they can be found at little cost."""
    try:
        split = _split(message, limits)
        is_small = len(split.head) <= _REMEMBERED_BYTES
        model_name = pb.ModelInferRequest.FromString(split.head).model_name if is_small else ""
        return model_name, known_id(split)
    except (ServerError, DecodeError):
        return "", ""


def encode_infer_response(request: InFlightRequest, response: InferResponse) -> Sequence[Buffer]:
    """A serialized ModelInferResponse in parts, tensors as raw_output_contents. The response must not be an error."""
    if _is_lone(request, response):
        output = response.outputs[0]
        raw = _raw_bytes(output)
        head = envelope.lone_output_fields(
            request.model_name, request.version, output.name, output.datatype, output.data.shape, len(raw)
        )
        return head, raw
    return _response_parts(request, response.outputs, response.parameters)


def encode_stream_response(request: InFlightRequest, response: InferResponse) -> Sequence[Buffer]:
    """A serialized ModelStreamInferResponse in parts, with the parameter that tells whether more will follow."""
    if _is_lone(request, response):
        return _lone_stream_parts(request, response.outputs[0], is_final=response.is_final)
    parts = _response_parts(request, response.outputs, response.parameters)
    parts.append(_IS_FINAL if response.is_final else _IS_NOT_FINAL)
    return (envelope.infer_response_head(sum(map(len, parts))), *parts)


def encode_stream_error(request_id: str, error: ServerError, model_name: str = "", *, is_final: bool = True) -> bytes:
    """A serialized ModelStreamInferResponse for a request that failed; the stream stays open."""
    response = pb.ModelInferResponse(id=request_id, model_name=model_name)
    response.parameters["triton_final_response"].bool_param = is_final
    # Clients take an empty message for success.
    message = sendable(error.message) or error.code.value
    return pb.ModelStreamInferResponse(error_message=message, infer_response=response).SerializeToString()


def _check_parameters(split: envelope.SplitRequest, limits: GrpcLimits) -> None:
    """Count parameters before protobuf makes objects of them, which take some ten times the memory."""
    limit = limits.max_parameters
    if split.num_parameters > limit:
        raise InvalidArgumentError(f"the request has more than {limit} parameters")
    try:
        envelope.check_tensor_fields(split.head, limit)
    except envelope.MalformedError:
        raise InvalidArgumentError(_MALFORMED) from None
    except envelope.TooManyFieldsError as error:
        raise _too_many_fields(error, limits) from None


def _too_many_fields(error: envelope.TooManyFieldsError, limits: GrpcLimits) -> ServerError:
    if error.num_parameters > limits.max_parameters:
        return InvalidArgumentError(f"an input or an output has more than {limits.max_parameters} parameters")
    return PayloadTooLargeError(
        "an input or an output repeats its fields: it has one name, one datatype, one shape and one contents; all of "
        f"them together have at most {_MAX_TENSOR_FIELDS} fields in a request of this size"
    )


def _split(message: Buffer, limits: GrpcLimits) -> envelope.SplitRequest:
    try:
        return envelope.split_request(message, limits.max_fields)
    except envelope.MalformedError:
        raise InvalidArgumentError(_MALFORMED) from None
    except envelope.TooManyFieldsError as error:
        if error.num_parameters > limits.max_parameters:
            raise InvalidArgumentError(f"the request has more than {limits.max_parameters} parameters") from None
        raise PayloadTooLargeError(
            f"the request has more than {limits.max_fields} fields: at most {limits.max_tensors} inputs, outputs and "
            f"raw_input_contents each, and {limits.max_parameters} parameters are allowed"
        ) from None


def _decode_id(encoded: Buffer) -> str:
    if len(encoded) > _MAX_ID_BYTES:
        raise PayloadTooLargeError(f"the request's id has {len(encoded)} bytes, at most {_MAX_ID_BYTES} are allowed")
    try:
        return str(encoded, "utf-8")
    except UnicodeDecodeError:
        raise InvalidArgumentError("the request's id is not UTF-8") from None


def _raw_inputs(head: InferCallHead, raws: Sequence[Buffer]) -> dict[str, Tensor]:
    """Inputs whose bytes are in raw_input_contents, by position."""
    if head.has_contents or len(raws) != len(head.inputs):
        raise _unusable_raws(head, len(raws))
    return {item.name: _raw_input(item, raw) for item, raw in zip(head.inputs, raws, strict=True)}


def _raw_input(item: InputHead, raw: Buffer) -> Tensor:
    if item.num_bytes != len(raw):
        return tensor_from_bytes(item.name, item.datatype, item.shape, raw)
    data = np.frombuffer(raw, item.datatype.numpy).reshape(item.shape)
    # A view into a large message may start anywhere; kernels expect whole elements on their boundaries.
    if not data.flags.aligned:
        data = data.copy()
    return Tensor(item.name, item.datatype, data)


def _typed_inputs(head: InferCallHead) -> dict[str, Tensor]:
    """Inputs whose elements are in each tensor's own `contents`."""
    return {tensor.name: _typed_input(tensor) for tensor in head.inputs}


def _typed_input(tensor: InputHead) -> Tensor:
    if tensor.contents is None:
        raise InvalidArgumentError(
            f"unable to find data for input tensor '{tensor.name}' for the model in request. Send it in "
            "raw_input_contents or in its contents"
        )
    return tensor_from_contents(tensor.name, tensor.datatype, tensor.shape, tensor.contents)


def _unusable_raws(head: InferCallHead, num_raws: int) -> ServerError:
    for tensor in head.inputs:
        if tensor.contents is not None:
            return InvalidArgumentError(
                f"contents field must not be specified when using raw_input_contents for input '{tensor.name}'"
            )
    missing = ", ".join(f"'{tensor.name}'" for tensor in head.inputs[num_raws:])
    hint = f"; unable to find data for {missing}" if missing else ""
    return InvalidArgumentError(
        f"expected {len(head.inputs)} entries in raw_input_contents, one for each input, got {num_raws}{hint}"
    )


def _too_many(head: InferCallHead, limits: GrpcLimits) -> ServerError:
    num_outputs = len(head.outputs or ())
    return PayloadTooLargeError(
        f"the request has {len(head.inputs)} inputs and names {num_outputs} outputs, "
        f"at most {limits.max_tensors} of each are allowed"
    )


def _is_lone(request: InFlightRequest, response: InferResponse) -> bool:
    """Whether this is the usual response, on the hot path, in which everything but the data is known bytes."""
    return len(response.outputs) == 1 and not request.id and not response.parameters and request.transfer is None


def _lone_stream_parts(request: InFlightRequest, output: Tensor, *, is_final: bool) -> Sequence[Buffer]:
    raw = _raw_bytes(output)
    size = len(raw)
    fields = envelope.lone_output_fields(
        request.model_name, request.version, output.name, output.datatype, output.data.shape, size
    )
    flag = _IS_FINAL if is_final else _IS_NOT_FINAL
    return envelope.infer_response_head(len(fields) + size + len(flag)) + fields, raw, flag


def _raw_bytes(output: Tensor) -> Buffer:
    data = output.data
    if data.nbytes < VIEW_BYTES and output.datatype.itemsize is not None:
        return data.tobytes()
    return tensor_to_bytes(output)


def _response_parts(
    request: InFlightRequest, outputs: Sequence[Tensor], parameters: Mapping[str, ParameterValue] | None
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
    placed = request.transfer.placed if request.transfer is not None else ()
    for output in outputs:
        parts.append(envelope.output_field(output.name, output.datatype.value, output.data.shape))
        raw = b"" if output.name in placed else _raw_bytes(output)
        raws += (envelope.raw_output_head(len(raw)), raw)
    parts += raws
    return parts

"""MLServer's types, and its codecs between inputs or outputs and values of Python.

Inputs come without a content type of their own: numbers are arrays and BYTES are texts, unless a codec is named.
"""

from __future__ import annotations

import base64
import functools
import importlib
import inspect
import typing
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

import numpy as np

from modelserver import backend
from modelserver.backend import Array, InternalError, InvalidArgumentError
from modelserver.embed.foreign.wire_tensor import WireTensor, datatype_of

_FIRST = "output-1"


class Record:
    """Fields by keywords: those of the class have defaults, and further ones are kept."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    dict = model_dump


class Parameters(Record):
    """Parameters of a request, an input or an output."""

    content_type: str | None = None
    headers: Mapping[str, str] | None = None


class TensorData(list[Any]):
    """The elements of an input or output in one list."""

    @property
    def root(self) -> list[Any]:
        return self


class RequestInput(WireTensor):
    """An input of a request."""

    def __init__(
        self, *, name: str, shape: Sequence[int], datatype: str, data: Any = (), parameters: Parameters | None = None
    ) -> None:
        elements = data if isinstance(data, list | tuple | np.ndarray) else [data]
        super().__init__(name, shape, str(getattr(datatype, "value", datatype)), elements, parameters)

    @property
    def data(self) -> TensorData:
        return TensorData(self.elements())


class ResponseOutput(RequestInput):
    """An output of a response."""


class RequestOutput(Record):
    """An output that a request names."""

    name: str = ""
    parameters: Parameters | None = None


class InferenceRequest(Record):
    """A request."""

    id: str | None = None
    parameters: Parameters | None = None
    inputs: Sequence[RequestInput] = ()
    outputs: Sequence[RequestOutput] | None = None

    @classmethod
    def of(cls, request: backend.InferRequest) -> Self:
        """A request of the server. `parameters.headers` are its parameters, of which the forwarded headers are."""
        inputs = []
        for tensor in request.inputs.values():
            made = RequestInput(name=tensor.name, shape=tensor.shape, datatype=tensor.datatype.value)
            made.take(tensor)
            inputs.append(made)
        texts = {name: value for name, value in request.parameters.items() if isinstance(value, str)}
        outputs = None if request.outputs is None else [RequestOutput(name=name) for name in request.outputs]
        parameters = Parameters(**{**request.parameters, "headers": texts})
        return cls(id=request.id or str(uuid.uuid4()), parameters=parameters, inputs=inputs, outputs=outputs)


class InferenceResponse(Record):
    """A response."""

    model_name: str = ""
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None
    outputs: Sequence[ResponseOutput] = ()


class NumpyCodec:
    """Arrays."""

    ContentType = "np"

    @staticmethod
    def decode_input(request_input: RequestInput) -> Array:
        return request_input.array

    @staticmethod
    def encode_output(name: str, payload: Any, **_: Any) -> ResponseOutput:
        array = np.asarray(payload)
        return ResponseOutput(name=name, shape=array.shape, datatype=datatype_of(array), data=array)

    encode_input = encode_output
    decode_output = decode_input


class StringCodec:
    """Lists of texts."""

    ContentType = "str"

    @staticmethod
    def decode_input(request_input: RequestInput) -> list[str]:
        return [each if isinstance(each, str) else str(each) for each in request_input.elements()]

    @staticmethod
    def encode_output(name: str, payload: Sequence[str], **_: Any) -> ResponseOutput:
        return ResponseOutput(name=name, shape=[len(payload), 1], datatype="BYTES", data=list(payload))

    encode_input = encode_output
    decode_output = decode_input


class Base64Codec:
    """Lists of bytes, which are in base64 outside."""

    ContentType = "base64"

    @staticmethod
    def decode_input(request_input: RequestInput) -> list[bytes]:
        try:
            return [base64.b64decode(each) for each in request_input.elements()]
        except ValueError as error:
            raise InvalidArgumentError(f"input '{request_input.name}': expected base64: {error}") from None

    @staticmethod
    def encode_output(name: str, payload: Sequence[bytes], **_: Any) -> ResponseOutput:
        texts = [base64.b64encode(each) for each in payload]
        return ResponseOutput(name=name, shape=[len(texts), 1], datatype="BYTES", data=texts)

    encode_input = encode_output
    decode_output = decode_input


class DatetimeCodec:
    """Lists of times, which are in ISO 8601 outside."""

    ContentType = "datetime"

    @staticmethod
    def decode_input(request_input: RequestInput) -> list[datetime]:
        try:
            return [datetime.fromisoformat(each) for each in request_input.elements()]
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"input '{request_input.name}': expected times: {error}") from None

    @staticmethod
    def encode_output(name: str, payload: Sequence[datetime], **_: Any) -> ResponseOutput:
        return StringCodec.encode_output(name, [each.isoformat() for each in payload])

    encode_input = encode_output
    decode_output = decode_input


class NumpyRequestCodec:
    """The only input of a request, as an array."""

    ContentType = "np"
    codec: Any = NumpyCodec

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        if len(request.inputs) != 1:
            raise InvalidArgumentError(f"expected one input, got {len(request.inputs)}")
        return cls.codec.decode_input(request.inputs[0])

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **_: Any
    ) -> InferenceResponse:
        output = cls.codec.encode_output(_FIRST, payload)
        return InferenceResponse(model_name=model_name, model_version=model_version, outputs=[output])


class StringRequestCodec(NumpyRequestCodec):
    """The only input of a request, as a list of texts."""

    ContentType = "str"
    codec = StringCodec


class PandasCodec:
    """Tables: an input or output for each column."""

    ContentType = "pd"

    @staticmethod
    def decode_request(request: InferenceRequest) -> Any:
        pandas = importlib.import_module("pandas")

        columns = {}
        for each in request.inputs:
            array = each.array
            columns[each.name] = (
                list(array) if array.ndim > 1 and array[0].size > 1
                else StringCodec.decode_input(each) if each.datatype == "BYTES" else array.reshape(-1)
            )  # fmt: skip
        return pandas.DataFrame(columns)

    @staticmethod
    def encode_response(model_name: str, payload: Any, model_version: str | None = None, **_: Any) -> InferenceResponse:
        outputs = []
        for name in payload.columns:
            column = payload[name].to_numpy()
            kept = column.astype(object) if column.dtype.kind in "OSU" else column
            outputs.append(NumpyCodec.encode_output(str(name), kept[:, None]))
        return InferenceResponse(model_name=model_name, model_version=model_version, outputs=outputs)


_INPUTS: dict[str, Any] = {each.ContentType: each for each in (NumpyCodec, StringCodec, Base64Codec, DatetimeCodec)}
_REQUESTS: dict[str, Any] = {each.ContentType: each for each in (NumpyRequestCodec, StringRequestCodec, PandasCodec)}


def codec_of(request_input: RequestInput, content_type: str | None, default: Any = None) -> Any:
    """The codec of an input. Raises InvalidArgumentError for a content type that is not known."""
    asked = content_type or (request_input.parameters.content_type if request_input.parameters else None)
    if asked is not None and asked not in _INPUTS:
        raise InvalidArgumentError(f"input '{request_input.name}': the content type '{asked}' is not known")
    if asked is not None:
        return _INPUTS[asked]
    return default or (StringCodec if request_input.datatype == "BYTES" else NumpyCodec)


def decode_inference_request(request: InferenceRequest, usual: str | None = None, default: Any = None) -> Any:
    """By the request's content type, by the usual one, by the codec, or the inputs by name."""
    asked = (request.parameters.content_type if request.parameters else None) or usual
    if asked is not None and asked not in _REQUESTS:
        raise InvalidArgumentError(f"the content type '{asked}' of the request is not known")
    codec = _REQUESTS[asked] if asked is not None else default
    if codec is not None:
        return codec.decode_request(request)
    return {each.name: codec_of(each, None).decode_input(each) for each in request.inputs}


def codec_named(payload: Any) -> Any:
    """The codec of a value: of a table, of texts, or of an array. It encodes outputs and responses."""
    if hasattr(payload, "columns"):
        return PandasCodec
    is_text = isinstance(payload, list) and bool(payload) and isinstance(payload[0], str)
    return _Both(StringRequestCodec if is_text else NumpyRequestCodec)


class _Both:
    """A codec of whole requests and of single outputs."""

    def __init__(self, codec: type[NumpyRequestCodec]) -> None:
        self.encode_response = codec.encode_response
        self.encode_output = codec.codec.encode_output


def decode_args(predict: Any) -> Any:
    """Have a method called with the inputs of its parameters' names and types; its results are the outputs."""
    hints = typing.get_type_hints(predict)
    hints.pop("return", None)
    parameters = [each for each in inspect.signature(predict).parameters.values() if each.name != "self"]
    names = [each.name for each in parameters if each.default is each.empty]

    @functools.wraps(predict)
    async def wrapped(self: Any, payload: InferenceRequest) -> InferenceResponse:
        given = {each.name: each for each in payload.inputs}
        if len(hints) == 1 and hasattr(next(iter(hints.values())), "columns"):
            found = {next(iter(hints)): PandasCodec.decode_request(payload)}
        else:
            if len(hints) == 1 and len(given) == 1:
                given = {next(iter(hints)): payload.inputs[0]}
            if missing := [name for name in names if name not in given]:
                raise InvalidArgumentError(f"the request has no input '{missing[0]}'")
            found = {name: _codec_of_hint(hints[name]).decode_input(given[name]) for name in hints if name in given}
        result = await predict(self, **found)
        if hasattr(result, "columns"):
            return PandasCodec.encode_response(self.name, result, self.version)
        results = result if isinstance(result, tuple) else (result,)
        outputs = [codec_named(each).encode_output(f"output-{number}", each) for number, each in enumerate(results)]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)

    return wrapped


def _codec_of_hint(hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType":
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if hint is np.ndarray or typing.get_origin(hint) is np.ndarray:
        return NumpyCodec
    kinds = {str: StringCodec, bytes: Base64Codec, datetime: DatetimeCodec}
    for kind in typing.get_args(hint):
        if kind in kinds:
            return kinds[kind]
    raise InternalError(f"decode_args: {hint!r} is not understood; expected an array, a table, or a list of str")

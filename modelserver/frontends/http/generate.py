"""The generate routes: an input is a key of a JSON object, and an answer one object or a stream of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import orjson

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core import accelerator
from modelserver.core.documents import beginning
from modelserver.core.element_arrays import SLICE_ELEMENTS
from modelserver.core.json_pieces import check_depth, key_of, parse_slices, stripped
from modelserver.core.long_work import Slices, finish, long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Buffer, Tensor
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError, UnsupportedError
from modelserver.frontends.http.body import (
    MAX_BYTES_ON_LOOP,
    answer_errors,
    check_size,
    respond_compressed,
    with_plain_body,
)
from modelserver.frontends.http.event_stream import AnswerForm, EventStream, document_form, events_form
from modelserver.frontends.http.inference import parse_version
from modelserver.frontends.http.json_tensor import (
    flat_values,
    has_non_finite,
    num_levels,
    parse_non_finite,
    tensor_from_json,
    tensor_to_json,
)
from modelserver.frontends.http.proxy_headers import adopt, reporting
from modelserver.frontends.http.request_parameters import apply_parameters, scalar_parameter
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import JSON_TYPE, HttpResponse, error_response


class Generate:
    """Answers `POST /v2/models/{name}[/versions/{version}]/generate` and `.../generate_stream`."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def generate(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """One object for the only response. Raises ServerError for a request that fails at once."""
        number = parse_version(name, version)
        exchange = reporting(exchange, self._dataplane, name, number)
        headers = exchange.head.headers
        accepted = headers.get("accept-encoding")
        form = document_form(headers.get("accept"))
        make = partial(_OnlyReply, exchange, choose_encoding(accepted) if accepted else None, form)
        self._with_body(exchange, partial(self._submit, exchange, name, number, make))

    def generate_stream(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """An event for each response. Raises ServerError for a request that fails at once."""
        number = parse_version(name, version)
        exchange = reporting(exchange, self._dataplane, name, number)
        form = events_form(exchange.head.headers.get("accept"))
        make = partial(EventStream, exchange, partial(encode_generate, is_nested=form.is_nested), form)
        self._with_body(exchange, partial(self._submit, exchange, name, number, make))

    def _with_body(self, exchange: HttpExchange, submit: Callable[[Buffer], None]) -> None:
        check_size(exchange.body, self._limits)
        if "content-encoding" in exchange.head.headers:
            with_plain_body(exchange, self._limits, submit)
        else:
            submit(exchange.body)

    def _submit(
        self,
        exchange: HttpExchange,
        name: str,
        version: int | None,
        make_reply: Callable[[], _OnlyReply | EventStream],
        body: Buffer,
    ) -> None:
        config = self._dataplane.model_config(name, version)
        infer = partial(self._infer, exchange, make_reply)
        if len(body) <= MAX_BYTES_ON_LOOP:
            infer(decode_generate(name, version, config, body, self._limits))
        else:
            slices = generate_slices(name, version, config, body, self._limits)
            exchange.on_disconnect = long_work().start(slices, partial(answer_errors, exchange, infer))

    def _infer(
        self, exchange: HttpExchange, make_reply: Callable[[], _OnlyReply | EventStream], request: InFlightRequest
    ) -> None:
        adopt(request, exchange, self._limits.access)
        reply = make_reply()
        request.stream = reply
        reply.request = request
        exchange.on_disconnect = request.cancel
        try:
            self._dataplane.infer(request)
        except BaseException:
            reply.release()
            raise


class _OnlyReply(ResponseStream):
    """Takes a request's responses and answers with the only one; zero or several responses are an error."""

    __slots__ = ("_encoding", "_exchange", "_form", "_held", "request")

    protocol = "HTTP"

    def __init__(self, exchange: HttpExchange, encoding: str | None, form: AnswerForm) -> None:
        super().__init__()
        self._form = form
        self._exchange: HttpExchange | None = exchange
        self._encoding = encoding
        self._held: InferResponse | None = None
        # Set before the request is submitted.
        self.request: InFlightRequest

    def deliver(self, response: InferResponse) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if not response.is_final and self._held is None and response.error is None:
            self._held = response
            return
        request, held = self.request, self._held
        self.release()
        try:
            answer = _answer(request, held, response, self._form)
        except Exception as error:
            if not response.is_final:
                request.cancel()
            answer = error_response(error)
        respond_compressed(exchange, answer, self._encoding)

    def release(self) -> None:
        """Release the exchange, which is answered."""
        self._exchange = self._held = None
        self.request = None  # type: ignore[assignment] # not used any more


def _answer(
    request: InFlightRequest, held: InferResponse | None, last: InferResponse, form: AnswerForm
) -> HttpResponse:
    """The answer, from any earlier response and a response that is final, an error, or one too many."""
    if last.error is not None:
        raise last.error
    is_empty = last.is_final and last.is_empty
    if (held is None) == is_empty:
        raise UnsupportedError(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )
    document = encode_generate(request, last if held is None else held, is_nested=form.is_nested)
    return HttpResponse(200, [JSON_TYPE], (document,))


# The generate extension: a flat JSON object -> `InFlightRequest`, `InferResponse` -> a flat JSON object.
#
# The value of a key that names an input is the input's elements; all other keys are parameters. The object
# `parameters` is read by the same rule. Shapes are not given. They follow from the number of elements, or from the
# nesting of arrays.

_PARAMETERS = "parameters"
_ID = "id"


def decode_generate(
    name: str, version: int | None, config: ModelConfig, body: Buffer, limits: HttpLimits
) -> InFlightRequest:
    """The request in a generate call's body. Raises InvalidArgumentError or PayloadTooLargeError."""
    document: Mapping[str, Any] = {}
    try:
        text = bytes(body)
        document = _parse(text, limits)
        _refuse_repeated(text, {spec.name: spec for spec in config.input})
        return finish(_request_slices(name, version, config, document, limits))
    except ServerError as error:
        error.name_request(name, _id_of(document))
        raise


def generate_slices(
    name: str, version: int | None, config: ModelConfig, body: Buffer, limits: HttpLimits
) -> Slices[InFlightRequest]:
    """As `decode_generate`, in slices, of a long body."""
    if accelerator.cut_members is None:
        yield
        return decode_generate(name, version, config, body, limits)
    document: Mapping[str, Any] = {}
    try:
        parsed = yield from parse_slices(body, max_depth=limits.max_json_depth, max_values=limits.max_json_values)
        document = _checked(parsed, limits)
        yield from _repetition_slices(memoryview(body), {spec.name for spec in config.input})
        return (yield from _request_slices(name, version, config, document, limits))
    except ServerError as error:
        error.name_request(name, _id_of(document))
        raise


def _id_of(document: Mapping[str, Any]) -> str:
    request_id = document.get(_ID)
    return request_id if isinstance(request_id, str) else ""


def _request_slices(
    name: str, version: int | None, config: ModelConfig, document: Mapping[str, Any], limits: HttpLimits
) -> Slices[InFlightRequest]:
    specs = {spec.name: spec for spec in config.input}
    is_batched = config.max_batch_size > 0
    inputs: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    request_id = ""
    for key, value in _entries(document, specs):
        spec = specs.get(key)
        if spec is not None:
            if key in inputs:
                raise InvalidArgumentError(f"input '{key}' already exists in request")
            inputs[key] = yield from tensor_slices_of(spec, value, limits, is_batched=is_batched)
        elif key == _ID:
            if not isinstance(value, str):
                raise InvalidArgumentError(
                    f"Unable to parse 'id': attempt to access JSON non-string as string: got {beginning(value, 40)}"
                )
            request_id = value
        else:
            parameters[key] = value
    if len(parameters) > limits.max_parameters:
        raise InvalidArgumentError(f"the request has more than {limits.max_parameters} parameters")
    request = InFlightRequest(model_name=name, version=version, inputs=inputs, id=request_id)
    if parameters:
        apply_parameters(request, parameters)
    return request


def encode_generate(request: InFlightRequest, response: InferResponse, *, is_nested: bool = False) -> bytes:
    """The answer for a response without error: outputs and parameters by name, next to the model's name and version.

    An output with one element is a value, any other a flat array, unless outputs are to be nested by their shapes.
    Raises InvalidArgumentError for an output that has no JSON form.
    """
    fields = {"model_name": orjson.dumps(request.model_name), "model_version": orjson.dumps(str(request.version or ""))}
    if request.id:
        fields[_ID] = orjson.dumps(request.id)
    for name, value in (response.parameters or {}).items():
        fields[name] = orjson.dumps(value)
    for tensor in response.outputs:
        text = tensor_to_json(tensor, is_nested=is_nested)
        fields[tensor.name] = text[1:-1] if tensor.data.size == 1 and not is_nested else text
    members = [b"".join((orjson.dumps(name), b":", fields[name])) for name in sorted(fields)]
    # One join, which gives the interpreter's lock back while it copies.
    members[0] = b"{" + members[0]
    members[-1] += b"}"
    return b",".join(members)


def _parse(text: bytes, limits: HttpLimits) -> dict[str, Any]:
    check_depth(text, limits.max_json_depth)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if not has_non_finite(text):
            raise InvalidArgumentError(f"failed to parse the request JSON buffer: {error}") from error
        document = parse_non_finite(text)
    return _checked(document, limits)


def _checked(document: Any, limits: HttpLimits) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise InvalidArgumentError(
            "attempt to get members for non-object: a generate request is a JSON object of inputs and parameters, got "
            f"{type(document).__name__}"
        )
    if len(document) > limits.max_tensors:
        raise PayloadTooLargeError(f"the request has more than {limits.max_tensors} inputs and parameters")
    return document


def _refuse_repeated(text: bytes, specs: Mapping[str, ModelInput]) -> None:
    """Raise InvalidArgumentError for a repeated input, of which the parser would keep the last."""

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidArgumentError(f"input '{name}' already exists in request")
            if name in specs:
                seen.add(name)

    # Few texts have the name of an input twice, and only those are parsed again.
    if any(text.count(b'"%b"' % name.encode()) > 1 for name in specs):
        json.loads(text, object_pairs_hook=note)


def _repetition_slices(text: memoryview, names: Collection[str]) -> Slices[None]:
    """As `_refuse_repeated`, of a long object: of its own members, and of those of its `parameters`."""
    assert accelerator.cut_members is not None, "the caller has looked"
    ends = accelerator.cut_members(text, 1)
    seen: set[str] = set()
    start = 1
    for end in np.frombuffer(ends or b"", np.int64).tolist():
        member = text[start:end]
        start = end + 1
        key = key_of(member)
        name = orjson.loads(key[1])
        if name in seen:
            raise InvalidArgumentError(f"input '{name}' already exists in request")
        if name in names:
            seen.add(name)
        elif name == _PARAMETERS:
            yield from _repetition_slices(stripped(member[key.end() :]), names)
        yield


def _entries(document: Mapping[str, Any], specs: Mapping[str, ModelInput]) -> list[tuple[str, Any]]:
    """The document's entries, with those of its object `parameters` in their place."""
    entries: list[tuple[str, Any]] = []
    for key, value in document.items():
        if key == _PARAMETERS and key not in specs:
            if not isinstance(value, dict):
                raise InvalidArgumentError(
                    "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object: got "
                    f"{beginning(value, 40)}"
                )
            _check_nested(value, specs)
            entries.extend(value.items())
        else:
            entries.append((key, value))
    return entries


def _check_nested(parameters: Mapping[str, Any], specs: Mapping[str, ModelInput]) -> None:
    for name, value in parameters.items():
        if name not in specs:
            try:
                scalar_parameter(name, value)
            except InvalidArgumentError as error:
                error.message = f"Converting keyword: '{_PARAMETERS}': {error.message}"
                raise


def tensor_slices_of(spec: ModelInput, value: Any, limits: HttpLimits, *, is_batched: bool) -> Slices[Tensor]:
    """An input from a value of JSON, whose shape may be left to the model's config. Raises InvalidArgumentError."""
    assert spec.data_type is not None, "a loaded model's inputs have datatypes"
    data = value if isinstance(value, list) else [value]
    data = _regular(data, spec.dims, is_batched=is_batched)
    if is_batched and num_levels(data) == len(spec.dims) > 1:
        data = [data]
    shape = _shape(spec, data, is_batched=is_batched)
    count = prod(shape)
    if count * (spec.data_type.itemsize or 4) > limits.max_body_bytes:
        raise PayloadTooLargeError(
            f"input '{spec.name}' is over the limit of {limits.max_body_bytes} bytes; raise it with "
            "--http-max-input-size"
        )
    if count <= SLICE_ELEMENTS or num_levels(data) > 1:
        yield
        return tensor_from_json(spec.name, spec.data_type, shape, count, data)
    array = np.empty(count, spec.data_type.numpy)
    for start in range(0, count, SLICE_ELEMENTS):
        part = data[start : start + SLICE_ELEMENTS]
        size = len(part)
        array[start : start + size] = tensor_from_json(spec.name, spec.data_type, (size,), size, part).data
        yield
    return Tensor(spec.name, spec.data_type, array.reshape(shape))


def _shape(spec: ModelInput, data: list[Any], *, is_batched: bool) -> tuple[int, ...]:
    """The shape of the elements as the model's config has it.

    In a flat list, the innermost variable dimension takes all elements, and other variable ones are 1. Nested lists
    with a level for each dimension define the shape.
    """
    dims = (-1, *spec.dims) if is_batched else tuple(spec.dims)
    if num_levels(data) > 1:
        return _nested_shape(data)
    known = prod(dim for dim in dims if dim != -1)
    num_items, rest = divmod(len(data), known) if known else (0, len(data))
    variable = max((index for index, dim in enumerate(dims) if dim == -1), default=None)
    if rest or (variable is None and num_items != 1 and known):
        raise _shape_error(spec, f"{len(data)} elements")
    return tuple(num_items if index == variable else 1 if dim == -1 else dim for index, dim in enumerate(dims))


def _regular(data: list[Any], dims: Sequence[int], *, is_batched: bool) -> list[Any]:
    """The data, or its elements in one list if its nesting does not match the input's dimensions.

    A batch of one may leave out the level of the batch.
    """
    if num_levels(data) == 1 and not any(isinstance(value, list) for value in data):
        return data
    elements, shape = flat_values(data), _nested_shape(data)
    if is_batched and not (len(shape) == len(dims) > 1):
        shape = shape[1:]
    fits = len(shape) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))
    return data if fits and prod(_nested_shape(data)) == len(elements) else elements


def _nested_shape(data: list[Any]) -> tuple[int, ...]:
    shape = []
    level: Any = data
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    return tuple(shape)


def _shape_error(spec: ModelInput, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The schema can not convert input '{spec.name}' to tensor with proper shape: "
        f"got {got} for dims {list(spec.dims)}"
    )

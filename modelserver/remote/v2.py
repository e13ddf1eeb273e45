"""Requests and responses of KServe's v2 protocol between our tensors and the bytes of both its transports."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message

from modelserver.backend import (
    Datatype,
    ErrorCode,
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    ModelConfig,
    Tensor,
)
from modelserver.client.call_error import CallError
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.http_pool import HttpPool
from modelserver.client.infer_answer import Output, grpc_outputs, http_outputs
from modelserver.core.tensor import Buffer, tensor_to_bytes
from modelserver.endpoints.endpoint import EndpointState, Outcome
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.kserve import HOPS, JSON_LEN_HEADER, TIMEOUT_HEADER

# What is taken off a deadline, so that the answer to its end still reaches the client.
_MARGIN_S = 0.001
_IS_FINAL = "triton_final_response"
# Of a ModelInferRequest: the tag of raw_input_contents, field 7, length-delimited.
_RAW_TAG = b"\x3a"
_READY, _NOT_READY = EndpointState.READY, EndpointState.STARTING


@dataclass(frozen=True, slots=True)
class Target:
    """The model at an endpoint; an empty version is the endpoint's choice."""

    model: str
    version: str

    @property
    def path(self) -> str:
        """The path of the model over HTTP."""
        path = f"/v2/models/{quote(self.model, safe='')}"
        return path + (f"/versions/{quote(self.version, safe='')}" if self.version else "")


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes with one attempt of a request. `ends_s` is its end by the monotonic clock, None: never."""

    headers: Mapping[str, str]
    hops: int
    ends_s: float | None

    @property
    def left_s(self) -> float | None:
        """The time that the endpoint has."""
        return None if self.ends_s is None else max(0.001, self.ends_s - time.monotonic() - _MARGIN_S)


@dataclass(frozen=True, slots=True)
class Described:
    """What an endpoint tells of its model: its config, or without one its metadata."""

    config: Mapping[str, Any] | None
    metadata: Mapping[str, Any]


class Transport(abc.ABC):
    """The way to one endpoint. Every call raises CallError."""

    @abc.abstractmethod
    async def infer(self, request: InferRequest, sent: Sent) -> InferResponse:
        """The one response."""

    @abc.abstractmethod
    def stream(self, request: InferRequest, sent: Sent) -> AsyncGenerator[InferResponse, None]:
        """The responses as they come; those without outputs are left out."""

    @abc.abstractmethod
    async def probe(self, headers: Mapping[str, str]) -> EndpointState:
        """READY, or STARTING if the model does not serve there."""

    @abc.abstractmethod
    async def describe(self, headers: Mapping[str, str]) -> Described: ...

    @abc.abstractmethod
    def lose(self, reason: str) -> None:
        """Break the connections: calls in flight fail with `reason`."""


def unreadable(error: Exception) -> CallError:
    """The error for an answer that cannot be read."""
    text = f"cannot read the answer: {type(error).__name__}: {error}"
    return CallError(text, code=ErrorCode.INTERNAL, outcome=Outcome.SERVER_ERROR)


class GrpcTransport(Transport):
    def __init__(self, pool: GrpcPool, target: Target) -> None:
        self._pool = pool
        self._target = target

    async def infer(self, request: InferRequest, sent: Sent) -> InferResponse:
        message = self._encode(request, sent)
        answer = await self._pool.ask("ModelInfer", message, sent.headers, timeout_s=sent.left_s)
        return _grpc_response(answer)

    async def stream(self, request: InferRequest, sent: Sent) -> AsyncGenerator[InferResponse, None]:
        message = self._encode(request, sent)
        call = self._pool.open("ModelStreamInfer", message, sent.headers, timeout_s=sent.left_s)
        try:
            while (piece := await call.message()) is not None:
                try:
                    answer = pb.ModelStreamInferResponse.FromString(piece)
                except DecodeError as error:
                    raise unreadable(error) from None
                if answer.error_message:
                    # A stream has no status for each error.
                    raise CallError(answer.error_message, code=ErrorCode.UNKNOWN, outcome=Outcome.CLIENT_ERROR)
                response = _response_of(answer.infer_response)
                if response.outputs or not response.is_final:
                    yield response
                if response.is_final:
                    return
        finally:
            call.close()

    async def probe(self, headers: Mapping[str, str]) -> EndpointState:
        question = pb.ModelReadyRequest(name=self._target.model, version=self._target.version)
        try:
            answer = await self._pool.ask("ModelReady", [question.SerializeToString()], headers)
        except CallError as error:
            return state_of(error)
        return _READY if pb.ModelReadyResponse.FromString(answer).ready else _NOT_READY

    async def describe(self, headers: Mapping[str, str]) -> Described:
        target = self._target
        metadata = await self._document(
            "ModelMetadata",
            pb.ModelMetadataRequest(name=target.model, version=target.version),
            pb.ModelMetadataResponse,
            headers,
        )
        try:
            config = await self._document(
                "ModelConfig",
                pb.ModelConfigRequest(name=target.model, version=target.version),
                pb.ModelConfigResponse,
                headers,
            )
        except CallError as error:
            if error.code is not ErrorCode.UNSUPPORTED:
                raise
            return Described(None, metadata)
        return Described(config.get("config", {}), metadata)

    async def _document(
        self, method: str, request: Message, response: type[Message], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        answer = await self._pool.ask(method, [request.SerializeToString()], headers)
        found: dict[str, Any] = MessageToDict(response.FromString(answer), preserving_proto_field_name=True)
        return found

    def lose(self, reason: str) -> None:
        self._pool.lose(reason)

    def _encode(self, request: InferRequest, sent: Sent) -> list[Buffer]:
        """The message in parts; tensors are not copied into it before it is sent."""
        message = pb.ModelInferRequest(
            model_name=self._target.model,
            model_version=self._target.version,
            id=request.id,
            inputs=[
                pb.ModelInferRequest.InferInputTensor(
                    name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape
                )
                for tensor in request.inputs.values()
            ],
            outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in request.outputs or ()],
        )
        for name, value in _parameters(request, sent).items():
            _set(message.parameters[name], value)
        parts: list[Buffer] = [message.SerializeToString()]
        for tensor in request.inputs.values():
            raw = tensor_to_bytes(tensor)
            parts += (_RAW_TAG + _varint(len(raw)), raw)
        return parts


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def _set(parameter: pb.InferParameter, value: float | str) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _parameters(request: InferRequest, sent: Sent) -> dict[str, bool | int | float | str]:
    """The parameters of a request, its sequence and its place in queues among them."""
    parameters: dict[str, bool | int | float | str] = {**request.parameters, HOPS: sent.hops}
    if request.sequence_id:
        parameters["sequence_id"] = request.sequence_id
        parameters["sequence_start"] = request.sequence_start
        parameters["sequence_end"] = request.sequence_end
    if request.priority:
        parameters["priority"] = request.priority
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    return parameters


def _grpc_response(answer: bytes) -> InferResponse:
    try:
        return _response_of(pb.ModelInferResponse.FromString(answer))
    except DecodeError as error:
        raise unreadable(error) from None


def _response_of(message: pb.ModelInferResponse) -> InferResponse:
    try:
        outputs = [each.tensor() for each in grpc_outputs(message)]
    except (ValueError, InvalidArgumentError) as error:
        raise unreadable(error) from None
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in message.parameters.items()
        if value.WhichOneof("parameter_choice")
    }
    is_final = bool(parameters.pop(_IS_FINAL, False))
    return InferResponse(outputs=outputs, parameters=parameters or None, is_final=is_final)


def state_of(error: CallError) -> EndpointState:
    """What a probe's error says: an endpoint that answers is not down. Raises the error of one that does not."""
    if error.outcome in (Outcome.CONNECT_FAILED, Outcome.LOST):
        raise error
    return _NOT_READY


class HttpTransport(Transport):
    """`config` tells the datatypes of streamed outputs, which do not say them themselves."""

    def __init__(
        self, pool: HttpPool, target: Target, *, base: str = "", config: ModelConfig, sends_binary: bool
    ) -> None:
        self._pool = pool
        self._path = base + target.path
        self._datatypes = {spec.name: spec.data_type for spec in config.output}
        self._is_batched = config.max_batch_size > 0
        self._sends_binary = sends_binary

    async def infer(self, request: InferRequest, sent: Sent) -> InferResponse:
        head, raws = self._encode(request, sent)
        body = orjson.dumps(head)
        headers = self._headers(sent)
        if raws:
            headers |= {JSON_LEN_HEADER: str(len(body)), "content-type": "application/octet-stream"}
        answer, content = await self._pool.ask("POST", f"{self._path}/infer", headers, [body, *raws])
        try:
            document, outputs = http_outputs(content, answer.json_len)
            return InferResponse(
                outputs=[each.tensor() for each in outputs], parameters=document.get("parameters") or None
            )
        except (ValueError, KeyError, TypeError, AttributeError, InvalidArgumentError) as error:
            raise unreadable(error) from None

    async def stream(self, request: InferRequest, sent: Sent) -> AsyncGenerator[InferResponse, None]:
        document: dict[str, Any] = {name: _plain(tensor) for name, tensor in request.inputs.items()}
        document["parameters"] = _parameters(request, sent)
        if request.id:
            document["id"] = request.id
        call = await self._pool.open(
            "POST", f"{self._path}/generate_stream", self._headers(sent), [orjson.dumps(document)]
        )
        try:
            await call.wait_for_head()
            async for line in call.lines():
                if line.startswith(b"data:"):
                    yield self._event(line[5:])
        finally:
            call.close()

    def _event(self, data: bytes) -> InferResponse:
        try:
            document = orjson.loads(data)
            if "error" in document:
                raise CallError(str(document["error"]), code=ErrorCode.UNKNOWN, outcome=Outcome.CLIENT_ERROR)
            outputs = [
                self._output(name, datatype, document[name])
                for name, datatype in self._datatypes.items()
                if datatype is not None and name in document
            ]
        except (ValueError, TypeError, InvalidArgumentError) as error:
            raise unreadable(error) from None
        return InferResponse(outputs=outputs, is_final=False)

    def _output(self, name: str, datatype: Datatype, value: Any) -> Tensor:
        values = value if isinstance(value, list) else [value]
        shape = np.shape(np.array(values, dtype=object))
        return Output(name, datatype.value, (1, *shape) if self._is_batched else shape, None, values).tensor()

    async def probe(self, headers: Mapping[str, str]) -> EndpointState:
        try:
            await self._pool.ask("GET", f"{self._path}/ready", headers)
        except CallError as error:
            return state_of(error)
        return _READY

    async def describe(self, headers: Mapping[str, str]) -> Described:
        metadata = await self._document("", headers)
        try:
            config = await self._document("/config", headers)
        except CallError as error:
            if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.UNSUPPORTED, ErrorCode.INVALID_ARGUMENT):
                raise
            return Described(None, metadata)
        return Described(config, metadata)

    async def _document(self, action: str, headers: Mapping[str, str]) -> dict[str, Any]:
        _, body = await self._pool.ask("GET", self._path + action, headers)
        try:
            return dict(orjson.loads(body))
        except (ValueError, TypeError) as error:
            raise unreadable(error) from None

    def lose(self, reason: str) -> None:
        self._pool.lose(reason)

    def _headers(self, sent: Sent) -> dict[str, str]:
        headers = {"content-type": "application/json", **sent.headers}
        if sent.left_s is not None:
            headers[TIMEOUT_HEADER] = str(max(1, int(sent.left_s * 1000)))
        return headers

    def _encode(self, request: InferRequest, sent: Sent) -> tuple[dict[str, Any], Sequence[Buffer]]:
        inputs, raws = [], []
        for tensor in request.inputs.values():
            entry: dict[str, Any] = {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": list(tensor.shape),
            }
            if self._sends_binary:
                raw = tensor_to_bytes(tensor)
                raws.append(raw)
                entry["parameters"] = {"binary_data_size": len(raw)}
            else:
                entry["data"] = _values(tensor)
            inputs.append(entry)
        parameters = _parameters(request, sent)
        document: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if request.id:
            document["id"] = request.id
        if request.outputs is not None:
            asked = {"parameters": {"binary_data": True}} if self._sends_binary else {}
            document["outputs"] = [{"name": name, **asked} for name in request.outputs]
        elif self._sends_binary:
            parameters["binary_data_output"] = True
        return document, raws


def _values(tensor: Tensor) -> list[Any]:
    """The elements as JSON has them. Raises InvalidArgumentError for those that it cannot have."""
    if tensor.datatype in (Datatype.FP16, Datatype.BF16):
        raise InvalidArgumentError(f"input '{tensor.name}': {tensor.datatype.value} has no form in JSON")
    values: list[Any] = tensor.data.ravel().tolist()
    if tensor.datatype is not Datatype.BYTES:
        return values
    try:
        return [each.decode() if isinstance(each, bytes) else str(each) for each in values]
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"input '{tensor.name}': bytes that are not UTF-8 have no form in JSON") from None


def _plain(tensor: Tensor) -> Any:
    """A tensor as the generate extension takes it: one value, or a list."""
    values = _values(tensor)
    return values[0] if len(values) == 1 else values

"""Requests and responses as records for a hop between processes, and back."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.backend import InferRequest, InferResponse, InvalidArgumentError, ServerError
from modelserver.core.response import RESCHEDULE, ParameterValue
from modelserver.execution.messages import ErrorRecord, RequestRecord, ResponseRecord
from modelserver.execution.packing import Payload, unpack
from modelserver.execution.shared_buffer import ByteView


def request_record(request: InferRequest, payload: Payload, number: int = 0) -> RequestRecord:
    """The record of a request; its tensors join `payload`. Raises InvalidArgumentError for what cannot travel."""
    parameters = _plain(request.parameters) if request.parameters else {}
    # By position, because names cost as much again.
    return RequestRecord(
        request.model_name,
        request.version,
        [payload.add(tensor) for tensor in request.inputs.values()],
        request.id,
        request.outputs,
        parameters,
        request.priority,
        request.timeout_us,
        request.deadline_ns,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
        request.rows,
        number,
        request.is_decoupled,
        None,
        request.trace_parent,
        request.arrival_ns,
    )


def response_of(record: ResponseRecord, payload: bytearray | ByteView) -> InferResponse | ServerError:
    """What the record says, with tensors that are views of `payload`."""
    if record.error is not None:
        return record.error.error()
    if record.is_reschedule:
        return RESCHEDULE
    outputs = [unpack(tensor, payload) for tensor in record.outputs]
    return InferResponse(outputs, parameters=record.parameters)


def response_record(response: InferResponse | ServerError, payload: Payload) -> ResponseRecord:
    """The record of a response; its tensors join `payload`."""
    if isinstance(response, ServerError):
        return ResponseRecord([], ErrorRecord.of(response), None)
    if response is RESCHEDULE:
        return ResponseRecord([], None, None, is_reschedule=True)
    if response.error is not None:
        return ResponseRecord([], ErrorRecord.of(response.error), None)
    parameters = _plain(response.parameters) if response.parameters is not None else None
    return ResponseRecord([payload.add(tensor) for tensor in response.outputs], None, parameters)


def _plain(parameters: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Parameters of plain types, which alone can be written: NumPy's FP64 is a float, and its text a str, too.

    Raises InvalidArgumentError for what cannot travel.
    """
    return {_plain_text(key, key): _plain_value(key, value) for key, value in parameters.items()}


def _plain_value(key: str, value: object) -> ParameterValue:
    if isinstance(value, str):
        return _plain_text(key, value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgumentError(f"parameter '{key}': {value} does not fit 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    found = type(value).__name__
    raise InvalidArgumentError(f"parameter '{key}' must be bool, int, float or str, got {found}")


def _plain_text(key: str, text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"parameter {key!a} is no text: {error}") from None
    return text if type(text) is str else str(text)

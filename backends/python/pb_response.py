"""`pb_utils.InferenceResponse`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from modelserver.backend import InferResponse, ResponseSender, ServerError

from .pb_error import TritonError, TritonModelException, list_of
from .pb_tensor import Tensor


class InferenceResponse:
    """The outputs, or the error, of one request."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        tensors = list_of("output_tensors of an InferenceResponse", output_tensors)
        for tensor in tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"output_tensors of an InferenceResponse must be pb_utils.Tensor objects, "
                    f"got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a pb_utils.TritonError, got {type(error).__name__}")
        check_parameters(parameters)
        self._output_tensors = tensors
        self._error = error
        self._parameters = parameters

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The response's parameters as a JSON object."""
        return json.dumps(self._parameters or {})

    def parameter_values(self) -> dict[str, Any] | None:
        return self._parameters


def check_parameters(parameters: dict[str, Any] | None) -> None:
    """Raise TritonModelException unless keys are str and values bool, int, float or str."""
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to have type dict, found type {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/float/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Parameter '{key}': {value} does not fit 64 bits")


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

# Makes what the server carries of a model's response, of the outputs that the request asked for (None: all of them).
Convert = Callable[[InferenceResponse, "tuple[str, ...] | None"], "InferResponse | ServerError"]


class InferenceResponseSender:
    """Sends the responses of one request, from any thread of the model; the request ends with the final flag."""

    __slots__ = ("_convert", "_outputs", "_sender")

    def __init__(self, sender: ResponseSender, convert: Convert, outputs: tuple[str, ...] | None) -> None:
        self._sender = sender
        self._convert = convert
        self._outputs = outputs

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the final flag, or both.

        Waits while the client has not read what was sent before. Raises TritonModelException after the final flag.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(
                f"a response sender sends pb_utils.InferenceResponse objects, got {type(response).__name__}"
            )
        made = None if response is None else self._convert(response, self._outputs)
        try:
            if flags:
                self._sender.finish(made)
            elif made is not None:
                self._sender.send(made)
        except ServerError as error:
            raise TritonModelException(error.message) from error

    def is_cancelled(self) -> bool:
        """Whether the client has left or given up."""
        return self._sender.is_cancelled

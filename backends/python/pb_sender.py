"""`pb_utils.InferenceResponseSender`: answers later, or many times."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.backend import InferResponse, ResponseSender, ServerError

from .pb_error import TritonModelException
from .pb_response import InferenceResponse

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

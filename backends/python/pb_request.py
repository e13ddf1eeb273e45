"""`pb_utils.InferenceRequest` and what hangs on it."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any

from modelserver.backend import InferRequest

from .pb_call import ResponseIterator, call, call_async
from .pb_error import TritonModelException, integer_of, list_of, text_of
from .pb_response import Convert, InferenceResponse, InferenceResponseSender, check_parameters
from .pb_tensor import Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(enum.IntEnum):
    """Where a tensor may lie, in the numbers of Triton's `pb_utils`, which are not those of its C API."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1
    TRITONSERVER_MEMORY_CPU_PINNED = 2


class PreferredMemory:
    """Where a caller would like its outputs."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(f"preferred_memory_type must be a MemoryType, got {preferred_memory_type!r}")
        self._type = preferred_memory_type
        self._device_id = integer_of("preferred_device_id", preferred_device_id)

    def memory_type(self) -> int:
        return self._type

    def device_id(self) -> int:
        return self._device_id


class InferenceTrace:
    """The client's trace that a request is part of, if it is of one."""

    def __init__(self, trace_parent: str = "") -> None:
        self.trace_parent = trace_parent

    def get_context(self) -> str | None:
        """A W3C carrier as JSON (`{"traceparent": "..."}`), as OpenTelemetry reads it; None without one."""
        is_context = bool(self.trace_parent) and self.trace_parent[0] != "#"  # else only this server knows it
        return json.dumps({"traceparent": self.trace_parent}) if is_context else None


_ANYWHERE = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request of a batch, or one that the model makes itself."""

    __slots__ = (
        "_convert",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_outputs",
        "_parameters",
        "_preferred_memory",
        "_release_flags",
        "_request",
        "_request_id",
        "_timeout",
        "_trace",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANYWHERE,
        trace: InferenceTrace = _NO_TRACE,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        # The order is Triton's, and there these three have no default.
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("an InferenceRequest needs inputs, requested_output_names and model_name")
        if correlation_id is None:
            raise TypeError("correlation_id must be an integer or text, got None")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if not isinstance(preferred_memory, PreferredMemory):
            raise TypeError(f"preferred_memory must be a PreferredMemory, got {type(preferred_memory).__name__}")
        if not isinstance(trace, InferenceTrace):
            raise TypeError(f"trace must be an InferenceTrace, got {type(trace).__name__}")
        check_parameters(parameters)
        self._request: InferRequest | None = None
        self._convert: Convert | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        self._inputs: list[Tensor] | None = list_of("inputs", inputs)
        self._outputs: Sequence[str] = [
            text_of("a name of requested_output_names", name)
            for name in list_of("requested_output_names", requested_output_names)
        ]
        self._parameters = parameters
        self._model_name = text_of("model_name", model_name)
        self._model_version = integer_of("model_version", model_version, lowest=-1, num_bits=63)
        self._request_id = text_of("request_id", request_id)
        if isinstance(correlation_id, str):
            self._correlation_id: int | str = text_of("correlation_id", correlation_id)
        else:
            self._correlation_id = integer_of("correlation_id", correlation_id)
        self._flags = integer_of("flags", flags, num_bits=32)
        self._timeout = integer_of("timeout", timeout)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._check_parts(self._inputs)

    def _check_parts(self, inputs: Sequence[Tensor]) -> None:
        whose = f"for request with id '{self._request_id}' and model name '{self._model_name}' should not be empty."
        for tensor in inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {whose}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs of an InferenceRequest must be Tensor objects, got {tensor!r}")
        if "" in self._outputs:
            raise TritonModelException(f"Requested output name {whose}")

    @classmethod
    def of(cls, request: InferRequest, output_names: Sequence[str], convert: Convert | None = None) -> InferenceRequest:
        """The model's view of a request; `output_names` are the outputs if it names none.

        `convert` is for its response sender.
        """
        self = cls.__new__(cls)
        self._request = request
        self._convert = convert
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        self._inputs = None
        self._outputs = output_names if request.outputs is None else request.outputs
        self._flags = 0
        if request.sequence_start:
            self._flags = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        if request.sequence_end:
            self._flags |= TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        return self

    def inputs(self) -> list[Tensor]:
        if self._inputs is None:
            assert self._request is not None, "a request without inputs was made of a server's request"
            self._inputs = [Tensor.of(tensor) for tensor in self._request.inputs.values()]
        return self._inputs

    def input_named(self, name: str) -> Tensor | None:
        """The input called `name`, without making objects of the others."""
        if self._request is not None:
            tensor = self._request.inputs.get(name)
            return None if tensor is None else Tensor.of(tensor)
        return next((tensor for tensor in self.inputs() if tensor.name() == name), None)

    def request_id(self) -> str:
        return self._request_id if self._request is None else self._request.id

    def correlation_id(self) -> int | str:
        return self._correlation_id if self._request is None else self._request.sequence_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = integer_of("flags", flags, num_bits=32)

    def timeout(self) -> int:
        """The request's patience in microseconds; 0 when it gave none."""
        return self._timeout if self._request is None else self._request.timeout_us

    def parameters(self) -> str:
        """The request's parameters as a JSON object."""
        if self._request is None:
            return json.dumps(self._parameters or {})
        return json.dumps(dict(self._request.parameters), separators=(",", ":"))  # as Triton's core writes it

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def preferred_memory(self) -> PreferredMemory:
        if self._request is not None:
            return PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self._request.trace_parent) if self._request is not None else self._trace

    def model_name(self) -> str:
        return self._model_name if self._request is None else self._request.model_name

    def model_version(self) -> int:
        return self._model_version if self._request is None else self._request.version or -1

    def is_cancelled(self) -> bool:
        """Whether the caller has gone or given up; asked of the server anew each time."""
        return self._request is not None and self._request.is_cancelled

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Let the server answer this request; blocks. With `decoupled` an iterator of responses.

        Whatever goes wrong with the request is in the response's `error()`.
        """
        return call(self._made(), decoupled=decoupled)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """As `exec`, for a coroutine."""
        return await call_async(self._made(), decoupled=decoupled)

    def get_response_sender(self) -> InferenceResponseSender:
        """How to answer this request later, or many times."""
        if self._request is None or self._convert is None:
            raise TritonModelException("get_response_sender() is for requests that the model is to answer")
        return InferenceResponseSender(self._request.sender, self._convert, self._request.outputs)

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: execute this request again (models with iterative sequences)."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"unknown release flags {flags}")
        self._release_flags = flags

    @property
    def is_rescheduled(self) -> bool:
        """Whether the model wants to execute the request again."""
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def _made(self) -> InferRequest:
        """The request as the server takes it."""
        if self._request is not None:
            raise TritonModelException("a request that came to the model cannot be sent on: make an InferenceRequest")
        return InferRequest(
            model_name=self._model_name,
            version=None if self._model_version < 0 else self._model_version,
            inputs={tensor.name(): tensor.core_tensor() for tensor in self.inputs()},
            id=self._request_id,
            outputs=tuple(self._outputs) or None,
            parameters=self._parameters or {},
            timeout_us=self._timeout,
            sequence_id=self._correlation_id,
            sequence_start=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            trace_parent=self._trace.trace_parent,
        )

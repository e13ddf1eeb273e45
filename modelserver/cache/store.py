"""The interface of a store of answers, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.tensor import Buffer, Tensor, tensor_to_bytes

# Cache keys. Two requests are equal with the same load of a model, the same inputs, and the same requested outputs.
# The id, priority, timeout and deadline of a request are left out: no answer depends on them.


# A client that sets this parameter to true gets an answer that is neither taken from a cache nor put in one.
NO_CACHE_PARAMETER = "modelserver_no_cache"

_KEY_BYTES = 16
_CHECK_BYTES = 32


class RequestKey:
    """Identifies equal requests. Keeps nothing of their inputs.

    `digest` (128 bits) finds an answer; `head` and `check` (256 further bits) prove that it is for an equal request.
    All are BLAKE2b hashes, for which no collision is known.
    """

    __slots__ = ("check", "digest", "generation", "head")

    def __init__(self, generation: bytes, head: bytes, inputs: Iterable[Buffer]) -> None:
        self.generation = generation
        self.head = head
        state = blake2b(generation, digest_size=_KEY_BYTES + _CHECK_BYTES)
        # Variable parts are prefixed with their lengths, so that different lists of parts never give the same bytes.
        state.update(len(generation).to_bytes(8, "little") + len(head).to_bytes(8, "little"))
        state.update(head)
        for data in inputs:
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
        digest = state.digest()
        self.digest = digest[:_KEY_BYTES]
        self.check = digest[_KEY_BYTES:]

    def is_equal(self, head: bytes, check: bytes) -> bool:
        """Whether the stored proof of a request with the same digest shows that it was equal."""
        return self.check == check and self.head == head


def make_key(request: InFlightRequest, generation: bytes) -> RequestKey:
    """The key of a checked request to the model identified by `generation`. From any thread."""
    tensors = [request.inputs[name] for name in sorted(request.inputs)]
    parameters = request.parameters
    head = repr((
        [(tensor.name, tensor.datatype.value, tensor.data.shape) for tensor in tensors],
        request.outputs,
        sorted(parameters.items()) if parameters else (),
        (request.sequence_id, request.sequence_start, request.sequence_end),
    ))  # fmt: skip
    return RequestKey(generation, head.encode(), map(tensor_to_bytes, tensors))


def input_size(request: InFlightRequest) -> int:
    """The bytes to hash for the key; of BYTES tensors only the references, as they are not joined."""
    return sum(tensor.data.nbytes for tensor in request.inputs.values())


def tensor_size(tensor: Tensor) -> int:
    """Bytes of memory that a tensor takes, the elements of BYTES included."""
    data = tensor.data
    num_bytes: int = data.nbytes
    return num_bytes if data.dtype != object else num_bytes + sum(element.__sizeof__() for element in data.ravel())


# The objects around the numbers of one tensor, in bytes, roughly.
_TENSOR_OVERHEAD = 256


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The outputs and parameters of a response; its tensors are read-only."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, ParameterValue] | None = None

    @classmethod
    def of(cls, response: InferResponse) -> CachedAnswer:
        """Copied, because outputs may be views of larger memory, or of memory that other code writes to."""
        outputs = tuple([Tensor(tensor.name, tensor.datatype, tensor.data.copy()) for tensor in response.outputs])
        for tensor in outputs:
            tensor.data.flags.writeable = False
        return cls(outputs, None if response.parameters is None else dict(response.parameters))

    @property
    def num_bytes(self) -> int:
        """Its memory in bytes, without Python's overhead for parameters."""
        return sum(tensor_size(tensor) + _TENSOR_OVERHEAD for tensor in self.outputs)

    def response(self) -> InferResponse:
        """A response of its own for one request, with the same tensors."""
        return InferResponse(outputs=list(self.outputs), parameters=self.parameters)


def response_size(response: InferResponse) -> int:
    """The size of a copy of the response in bytes, without BYTES elements."""
    return sum(tensor.data.nbytes for tensor in response.outputs)


@dataclass(slots=True)
class StoreCounts:
    """Numbers since the server's start; times in ns. `num_bytes` of `max_bytes` are used if the store knows them."""

    num_entries: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    failures: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0

    @property
    def misses(self) -> int:
        return self.lookups - self.hits


Found = Callable[[CachedAnswer | None], None]


class AnswerStore(Protocol):
    """Keeps answers by key. Event loop thread, except `pack`. No method ever fails a request.

    `is_shared`: answers outlive the process, and other servers find them; so a model's generation must identify the
    model's content.
    """

    @property
    def counts(self) -> StoreCounts: ...

    @property
    def is_shared(self) -> bool: ...

    def look_up(self, key: RequestKey, found: Found) -> None:
        """Call `found` once, now or later, with the answer to an equal request, or None."""

    def pack(self, key: RequestKey, response: InferResponse) -> Any:
        """The argument of `insert`, or None if the answer must not be stored. From any thread; slow: it copies."""

    def insert(self, key: RequestKey, packed: Any) -> None:
        """Store a packed answer, replacing an existing one."""

    def forget(self, generation: bytes) -> None:
        """Drop the answers of a model that no longer serves, if the store is not shared."""

    async def close(self) -> None:
        """Close connections."""

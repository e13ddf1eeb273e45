"""Cache keys. Two requests are equal with the same load of a model, the same inputs, and the same requested outputs.

The id, priority, timeout and deadline of a request are left out: no answer depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Buffer, Tensor, tensor_to_bytes

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

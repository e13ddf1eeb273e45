"""Tensors to send: a specification, and bytes made or read for it."""

from __future__ import annotations

import base64
import math
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor, encode_bytes_elements, tensor_from_bytes, tensor_to_bytes
from modelserver.errors import InvalidArgumentError

# Random integers stay below this: they are often indices.
MAX_RANDOM_INT = 128
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor as it is sent: its bytes, or where in shared memory they are."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    raw: bytes
    region: str = ""
    region_offset: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.raw)

    def values(self) -> list[Any]:
        """The elements for JSON, flat. Raises InvalidArgumentError for what JSON has no form for."""
        if self.datatype is Datatype.BF16:
            raise InvalidArgumentError(f"input '{self.name}' is BF16, which cannot be sent as JSON")
        flat = tensor_from_bytes(self.name, self.datatype, self.shape, self.raw).data.ravel().tolist()
        return [item.decode(errors="replace") if isinstance(item, bytes) else item for item in flat]


def zeros(spec: TensorSpec, shape: tuple[int, ...], text: str) -> bytes:
    """Zeros; `text` for each element of a BYTES tensor."""
    if spec.datatype.itemsize is None:
        return encode_bytes_elements([text.encode()] * math.prod(shape))
    return bytes(math.prod(shape) * spec.datatype.itemsize)


def random_values(
    spec: TensorSpec, shape: tuple[int, ...], source: random.Random, *, text: str, text_len: int
) -> bytes:
    """Random numbers: 0 to 1 for floats, small ones for integers; `text`, or random letters, for BYTES."""
    count = math.prod(shape)
    if spec.datatype.itemsize is None:
        if text:
            return encode_bytes_elements([text.encode()] * count)
        return encode_bytes_elements("".join(source.choices(_LETTERS, k=text_len)).encode() for _ in range(count))
    numbers = np.random.default_rng(source.getrandbits(32))
    if spec.datatype is Datatype.BOOL:
        return numbers.integers(0, 2, count).astype(np.bool_).tobytes()
    if spec.datatype is Datatype.BF16:
        bits = numbers.random(count, dtype=np.float32).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16).tobytes()
    if spec.datatype.numpy.kind == "f":
        return numbers.random(count).astype(spec.datatype.numpy).tobytes()
    return numbers.integers(0, MAX_RANDOM_INT, count).astype(spec.datatype.numpy).tobytes()


def from_document(spec: TensorSpec, entry: object, default_shape: tuple[int, ...], where: str) -> InputTensor:
    """A tensor of a data file: a flat list, `{"b64": ...}`, or either of them as `content` beside a `shape`.

    Raises InvalidArgumentError that says `where`.
    """
    content, shape = entry, default_shape
    if isinstance(entry, Mapping) and "b64" not in entry:
        if "content" not in entry:
            raise InvalidArgumentError(
                f"{where}: expected 'content' or 'b64', got {', '.join(map(str, entry)) or '{}'}"
            )
        content = entry["content"]
        if "shape" in entry:
            shape = _shape(entry["shape"], where)
    if min(shape, default=0) < 0:
        raise InvalidArgumentError(
            f"{where}: the model's shape {list(shape)} is variable; add a 'shape' beside 'content', "
            f"or say --shape {spec.name}:<sizes>"
        )
    raw = _raw(spec, content, where)
    try:
        tensor_from_bytes(spec.name, spec.datatype, shape, raw)
    except InvalidArgumentError as error:
        # `where` ends with the tensor's name, with which the message begins.
        problem = error.message.removeprefix(f"input '{spec.name}': ")
        raise InvalidArgumentError(f"{where}: {problem}") from None
    return InputTensor(spec.name, spec.datatype, shape, raw)


def _shape(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(size, int) and size >= 0 for size in value):
        raise InvalidArgumentError(f"{where}: expected a shape such as [2, 3], got {value!r}")
    return tuple(value)


def _raw(spec: TensorSpec, content: object, where: str) -> bytes:
    if isinstance(content, Mapping):
        try:
            return base64.b64decode(content["b64"], validate=True)
        except (ValueError, TypeError, KeyError):
            raise InvalidArgumentError(f"{where}: 'b64' is not base64") from None
    flat = _flatten(content)
    if spec.datatype is Datatype.BYTES:
        return encode_bytes_elements(item if isinstance(item, str) else str(item) for item in flat)
    try:
        array = np.asarray(flat)
        if array.dtype.kind not in "biuf" and flat:
            raise ValueError("these are not numbers")
        if spec.datatype is Datatype.BF16:
            bits = array.astype(np.float32).view(np.uint32)
            return (bits >> np.uint32(16)).astype(np.uint16).tobytes()
        return bytes(tensor_to_bytes(Tensor(spec.name, spec.datatype, array.astype(spec.datatype.numpy))))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"{where}: expected numbers for {spec.datatype.value}: {error}") from None


def _flatten(content: object) -> list[Any]:
    if not isinstance(content, list):
        return [content]
    if any(isinstance(item, list) for item in content):
        return [inner for item in content for inner in _flatten(item)]
    return content


def stack(tensors: Sequence[InputTensor]) -> InputTensor:
    """One tensor of a batch from those of its rows. Raises InvalidArgumentError when the shapes differ."""
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        raise InvalidArgumentError(
            f"input '{first.name}': rows of shapes {sorted({tensor.shape for tensor in tensors})} do not make a batch; "
            "use -b 1, or data of one shape"
        )
    raw = b"".join(tensor.raw for tensor in tensors)
    return InputTensor(first.name, first.datatype, (len(tensors), *first.shape), raw)

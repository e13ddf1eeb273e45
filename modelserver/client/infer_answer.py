"""Outputs of an inference as they arrive: JSON followed by bytes over HTTP, or a message over gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor, tensor_from_bytes
from modelserver.pb import grpc_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Output:
    """One output: its bytes, or the values of its JSON. It has neither if it is in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | None
    values: list[Any] | None = None

    def tensor(self) -> Tensor:
        """Raises ValueError for an output in shared memory, and a ServerError if the bytes do not fit the shape."""
        datatype = Datatype(self.datatype)
        if self.raw is not None:
            return tensor_from_bytes(self.name, datatype, self.shape, self.raw)
        if self.values is None:
            raise ValueError(f"output '{self.name}' has no data in the answer")
        values: list[Any] = self.values
        if datatype is Datatype.BYTES:
            values = [each.encode() if isinstance(each, str) else each for each in _flat(values)]
        return Tensor(self.name, datatype, np.array(values, dtype=datatype.numpy).reshape(self.shape))


def http_outputs(body: bytes, json_len: int | None) -> tuple[dict[str, Any], list[Output]]:
    """The document of an answer, and its outputs; `json_len` is None for an answer that is only JSON.

    Raises ValueError, KeyError or TypeError for an answer that cannot be read.
    """
    offset = len(body) if json_len is None else json_len
    document: dict[str, Any] = json.loads(body[:offset])
    found = []
    for entry in document["outputs"]:
        name, datatype, shape = entry["name"], entry["datatype"], tuple(entry["shape"])
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            found.append(Output(name, datatype, shape, None, entry.get("data")))
            continue
        found.append(Output(name, datatype, shape, body[offset : offset + size]))
        offset += size
    if offset != len(body):
        raise ValueError(f"its tensors end at byte {offset} of {len(body)}")
    return document, found


def grpc_outputs(response: pb.ModelInferResponse) -> list[Output]:
    """Raises ValueError if the message has bytes for some outputs only."""
    raws: Sequence[bytes | None] = response.raw_output_contents or [None] * len(response.outputs)
    return [
        Output(output.name, output.datatype, tuple(output.shape), raw, None if raw is not None else _typed(output))
        for output, raw in zip(response.outputs, raws, strict=True)
    ]


def _typed(output: pb.ModelInferResponse.InferOutputTensor) -> list[Any] | None:
    """The elements of an output that is written element by element; None for one that is elsewhere."""
    for _, values in output.contents.ListFields():
        return list(values)
    return None


def _flat(values: list[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each

"""Traces in files of Triton's format: a JSON array of small objects. A file is complete after each trace."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.core.trace import Trace

logger = logging.getLogger(__name__)


class TraceFile:
    """Writes to `path`, or to `path.0`, `path.1`, ... with a limit of traces per file. Called from one thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._num_files = 0
        self._num_traces = 0
        self._log_frequency = 0

    def write(self, traces: list[tuple[Trace, int]]) -> None:
        """Add traces, each with its `log_frequency`. Failures to write are logged."""
        try:
            for trace, log_frequency in traces:
                self._add(trace, log_frequency)
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            logger.error("traces cannot be written to '%s': %s", self._path, error.strerror)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, trace: Trace, log_frequency: int) -> None:
        if log_frequency != self._log_frequency or (log_frequency and self._num_traces >= log_frequency):
            self.close()
            self._log_frequency = log_frequency
        if self._file is None:
            self._begin()
        file = self._file
        assert file is not None, "it was begun"
        rows = orjson.dumps(entries(trace))[1:-1]
        if self._num_traces:
            file.seek(-1, 2)  # over the bracket that ends the array
            file.write(b",")
        else:
            file.write(b"[")
        file.write(rows + b"]")
        self._num_traces += 1

    def _begin(self) -> None:
        path = self._path
        if self._log_frequency:
            path = f"{path}.{self._num_files}"
            self._num_files += 1
        self._file = Path(path).open("wb+")  # noqa: SIM115 - it stays open until it is full
        self._num_traces = 0


def entries(trace: Trace) -> list[dict[str, Any]]:
    """A trace as objects of the file, after the objects of the requests made for it."""
    head: dict[str, Any] = {"id": trace.id, "model_name": trace.model_name, "model_version": trace.version}
    if trace.request_id:
        head["request_id"] = trace.request_id
    if trace.caller is not None:
        head["parent_id"] = trace.caller.id
    rows = [row for child in trace.children for row in entries(child)]
    rows.append(head)
    rows += [{"id": trace.id, "timestamps": [{"name": name, "ns": time_ns}]} for name, time_ns in trace.events]
    rows += [{"id": trace.id, "activity": activity, "tensor": _tensor(tensor)} for activity, tensor in trace.tensors]
    return rows


def _tensor(tensor: Tensor) -> dict[str, str]:
    return {
        "name": tensor.name,
        "data": ",".join(_elements(tensor)),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype.value,
    }


def _elements(tensor: Tensor) -> list[str]:
    data = tensor.data.ravel()
    if tensor.datatype is Datatype.BYTES:
        return [f'"{_text(element)}"' for element in data.tolist()]
    if tensor.datatype is Datatype.BF16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    if data.dtype.kind == "b":
        return [str(int(element)) for element in data.tolist()]
    return [f"{element:g}" if data.dtype.kind == "f" else str(element) for element in data.tolist()]


def _text(element: object) -> str:
    return element.decode(errors="replace") if isinstance(element, bytes) else str(element)

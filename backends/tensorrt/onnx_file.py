"""Reads an ONNX file without any ONNX library: its inputs, outputs, and the files beside it.

Field numbers are those of onnx.proto. Weights are never read; large files are mapped, not loaded.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend import Datatype, InvalidArgumentError, NotFoundError

from .wire_format import WireFormatError, fields, nested, signed, text

# TensorProto.DataType
_DATATYPES = {
    1: Datatype.FP32,
    2: Datatype.UINT8,
    3: Datatype.INT8,
    4: Datatype.UINT16,
    5: Datatype.INT16,
    6: Datatype.INT32,
    7: Datatype.INT64,
    8: Datatype.BYTES,
    9: Datatype.BOOL,
    10: Datatype.FP16,
    11: Datatype.FP64,
    12: Datatype.UINT32,
    13: Datatype.UINT64,
    16: Datatype.BF16,
}
_EXTERNAL = 1  # TensorProto.DataLocation
# Nested graphs (If, Loop): real models have none deeper than this.
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """An input or output; a dimension is a size, the name of a symbolic one, or None. `dims` None: unknown rank."""

    name: str
    datatype: Datatype | None
    dims: tuple[int | str | None, ...] | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The dimensions with -1 for every variable one."""
        return None if self.dims is None else tuple(dim if isinstance(dim, int) else -1 for dim in self.dims)


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """One ONNX model. `external_files` are those that hold weights, by their paths, each proven to be in its folder."""

    path: Path
    inputs: tuple[OnnxTensor, ...]
    outputs: tuple[OnnxTensor, ...]
    external_files: tuple[Path, ...] = ()
    opset: int = 0
    producer: str = ""


def read_onnx(path: Path) -> OnnxFile:
    """The model in a file.

    Raises NotFoundError without a file; InvalidArgumentError for one that is not a model, has no inputs or outputs, or
    takes its weights from outside its own directory.
    """
    try:
        with path.open("rb") as file:
            # Not closed here: a view in a traceback would forbid it. It is, when the last of them is gone.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        model = _Model(memoryview(mapped))
    except FileNotFoundError as error:
        raise NotFoundError(f"unable to find '{path}'") from error
    except IsADirectoryError as error:
        raise InvalidArgumentError(f"{path}: expected an ONNX file, got a directory; name the file in it") from error
    except (OSError, ValueError) as error:  # mmap says ValueError of an empty file, and a WireFormatError is one
        raise InvalidArgumentError(f"{path}: expected an ONNX model, got something else: {error}") from error
    inputs = tuple(tensor for tensor in model.inputs if tensor.name not in model.initializers)
    for kind, tensors in (("input", inputs), ("output", model.outputs)):
        if not tensors:
            raise InvalidArgumentError(f"{path}: expected an ONNX model with at least one {kind}, got none")
    external = tuple(_contained(path, location) for location in sorted(model.locations))
    return OnnxFile(path, inputs, tuple(model.outputs), external, model.opset, model.producer)


def _contained(path: Path, location: str) -> Path:
    """The file of external data, symbolic links resolved. Raises InvalidArgumentError if it lies elsewhere."""
    directory = path.parent.resolve()
    file = (directory / location).resolve()
    if not file.is_relative_to(directory):
        raise InvalidArgumentError(
            f"{path}: weights are taken from '{location}', which is outside of the model's directory {directory}; "
            "put the file beside the model"
        )
    if not file.is_file():
        raise InvalidArgumentError(f"{path}: expected its weights in the file '{location}' beside it, found none")
    return file


class _Model:
    """The parts of a ModelProto that count."""

    def __init__(self, message: memoryview) -> None:
        self.inputs: list[OnnxTensor] = []
        self.outputs: list[OnnxTensor] = []
        self.initializers: set[str] = set()
        self.locations: set[str] = set()
        self.opset = 0
        self.producer = ""
        for number, value in fields(message):
            if number == 2:
                self.producer = text(value)
            elif number == 7:
                self._read_graph(nested(value), depth=0)
            elif number == 8:
                self._read_opset(nested(value))

    def _read_opset(self, message: memoryview) -> None:
        domain, version = "", 0
        for number, value in fields(message):
            if number == 1:
                domain = text(value)
            elif number == 2:
                version = signed(value)
        if domain in ("", "ai.onnx"):
            self.opset = version

    def _read_graph(self, message: memoryview, *, depth: int) -> None:
        if depth > _DEEPEST:
            raise WireFormatError(f"graphs are nested more than {_DEEPEST} deep")
        for number, value in fields(message):
            if number == 1:
                self._read_node(nested(value), depth)
            elif number == 5:
                self._read_tensor(nested(value), is_initializer=depth == 0)
            elif depth == 0 and number == 11:
                self.inputs.append(_value_info(nested(value)))
            elif depth == 0 and number == 12:
                self.outputs.append(_value_info(nested(value)))

    def _read_node(self, message: memoryview, depth: int) -> None:
        for number, value in fields(message):
            if number == 5:
                self._read_attribute(nested(value), depth)

    def _read_attribute(self, message: memoryview, depth: int) -> None:
        for number, value in fields(message):
            if number in (5, 10):
                self._read_tensor(nested(value), is_initializer=False)
            elif number in (6, 11):
                self._read_graph(nested(value), depth=depth + 1)

    def _read_tensor(self, message: memoryview, *, is_initializer: bool) -> None:
        location, is_external = "", False
        for number, value in fields(message):
            if number == 8 and is_initializer:
                self.initializers.add(text(value))
            elif number == 13:
                key, entry = _entry(nested(value))
                if key == "location":
                    location = entry
            elif number == 14:
                is_external = signed(value) == _EXTERNAL
        if is_external:
            self.locations.add(location)


def _entry(message: memoryview) -> tuple[str, str]:
    found = dict(fields(message))
    return text(found.get(1, memoryview(b""))), text(found.get(2, memoryview(b"")))


def _value_info(message: memoryview) -> OnnxTensor:
    name, datatype, dims = "", None, None
    for number, value in fields(message):
        if number == 1:
            name = text(value)
        elif number == 2:
            for kind, tensor in fields(nested(value)):
                if kind == 1:  # a tensor; sequences, maps and the like have other numbers
                    datatype, dims = _tensor_type(nested(tensor))
    return OnnxTensor(name, datatype, dims)


def _tensor_type(message: memoryview) -> tuple[Datatype | None, tuple[int | str | None, ...] | None]:
    datatype: Datatype | None = None
    dims: tuple[int | str | None, ...] | None = None
    for number, value in fields(message):
        if number == 1:
            datatype = _DATATYPES.get(signed(value))
        elif number == 2:
            dims = tuple(_dims(nested(value)))
    return datatype, dims


def _dims(message: memoryview) -> Iterator[int | str | None]:
    for number, value in fields(message):
        if number != 1:
            continue
        dim: int | str | None = None
        for kind, size in fields(nested(value)):
            if kind == 1:
                dim = signed(size)
            elif kind == 2:
                dim = text(size) or None
        # Exporters write 0 or -1 for what they do not know.
        yield None if isinstance(dim, int) and dim < 0 else dim

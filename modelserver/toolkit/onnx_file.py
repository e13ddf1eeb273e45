"""ONNX files: read with everything that belongs to them, written so that they serve, also with float16 weights.

Needs the onnx library.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.toolkit import require

# Protobuf holds less than 2 GiB; larger weights go into a file beside.
MAX_INLINE_BYTES = 1_500_000_000
FILENAME = "model.onnx"
_EXTERNAL = 1  # TensorProto.EXTERNAL
_GRAPH, _GRAPHS = 5, 10  # AttributeProto types


def onnx_library() -> Any:
    """The onnx module. Raises UnavailableError with the pip line."""
    return require("onnx", extra="convert", purpose="reading ONNX files")


def read_onnx(path: Path) -> Any:
    """The model with all weights. Raises InvalidArgumentError for a file that is none."""
    onnx = onnx_library()
    model = _read_structure(path)
    folder = str(path.parent)
    try:
        onnx.external_data_helper.load_external_data_for_model(model, folder)
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        raise InvalidArgumentError(f"'{path}': its external weights cannot be read: {_first_line(error)}") from None
    return model


def _read_structure(path: Path) -> Any:
    """The model without the weights that lie in other files."""
    onnx = onnx_library()
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read '{path}': {error.strerror}") from None
    except (DecodeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"'{path}' is not an ONNX model: {_first_line(error)}") from None
    if not model.graph.output or not model.opset_import:
        raise InvalidArgumentError(f"'{path}' is not an ONNX model: it has no outputs or no operator set")
    return model


def external_files(path: Path) -> tuple[str, ...]:
    """Names of the weight files beside it. Raises InvalidArgumentError for files outside of its directory."""
    model = _read_structure(path)
    found = set()
    for tensor in _tensors(model.graph):
        if tensor.data_location == _EXTERNAL:
            found |= {entry.value for entry in tensor.external_data if entry.key == "location"}
    root = path.parent.resolve()
    for name in found:
        where = (path.parent / name).resolve()
        if root not in where.parents:
            raise InvalidArgumentError(f"'{path}' needs weights from '{name}', outside of its directory")
        if not where.is_file():
            raise InvalidArgumentError(f"'{path}' needs weights from '{name}', which is not beside it")
    return tuple(sorted(found))


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
    for inner in subgraphs(graph):
        yield from _tensors(inner)


def subgraphs(graph: Any) -> Iterator[Any]:
    """The graphs that nodes of this one contain: branches and loop bodies."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == _GRAPH:
                yield attribute.g
            elif attribute.type == _GRAPHS:
                yield from attribute.graphs


def write_onnx(model: Any, directory: Path) -> Path:
    """Write `model.onnx` into a version directory, large weights beside it; its path."""
    onnx = onnx_library()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILENAME
    if model.ByteSize() > MAX_INLINE_BYTES:
        onnx.save(model, str(path), save_as_external_data=True, location=f"{FILENAME}.data")
    else:
        path.write_bytes(model.SerializeToString(deterministic=True))
    return path


@contextmanager
def readable_names(shown: str) -> Iterator[None]:
    """Raise InvalidArgumentError if a name in a damaged file is not text, before any other code reads it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"'{shown}' is damaged: a name in it is not UTF-8 text ({error.reason})") from error


def strip_origin(model: Any) -> None:
    """Remove information about the machine and code that made the model: doc strings and exporters' traces."""
    model.doc_string = ""
    del model.metadata_props[:]
    _strip(model.graph)
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            _strip_entry(node)


def _strip(graph: Any) -> None:
    _strip_entry(graph)
    for entries in (graph.node, graph.initializer, graph.input, graph.output, graph.value_info):
        for entry in entries:
            _strip_entry(entry)
    for inner in subgraphs(graph):
        _strip(inner)


def _strip_entry(entry: Any) -> None:
    entry.doc_string = ""
    if hasattr(entry, "metadata_props"):
        del entry.metadata_props[:]


def count_ops(model: Any) -> Counter[str]:
    """How many nodes of each operator, in graphs within graphs too."""
    counts: Counter[str] = Counter()
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        counts.update(node.op_type for node in graph.node)
        graphs += subgraphs(graph)
    return counts


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# The largest number that FP16 has.
MAX_FLOAT16 = 65504.0
_FLOAT, _FLOAT16 = 1, 10


def to_float16(model: Any, *, keep: Sequence[str] = ()) -> tuple[Any, tuple[str, ...]]:
    """The converted model, and notes. Operators in `keep`, and those that FP16 does not exist for, stay in FP32.

    Raises InvalidArgumentError for an operator to keep that the model lacks, UnsupportedError when nothing is FP32.
    """
    float16 = require("onnxruntime.transformers.float16", extra="convert", purpose="conversion to FP16")
    onnx_library()
    counts = count_ops(model)
    for operator in keep:
        if operator not in counts:
            raise InvalidArgumentError(f"--keep-op: the model has no {operator}{nearest_hint(operator, list(counts))}")
    if not any(tensor.data_type == _FLOAT for tensor in model.graph.initializer):
        what = "it is in FP16 already" if _has_float16(model) else "there are no FP32 weights in it"
        raise UnsupportedError(f"nothing to convert to FP16: {what}")
    blocked = [*float16.DEFAULT_OP_BLOCK_LIST, *keep]
    notes = _notes(model, sorted(set(blocked) & set(counts)))
    try:
        with warnings.catch_warnings():
            # A warning for every value that is rounded to zero: the comparison shows the effect.
            warnings.simplefilter("ignore")
            level = logging.root.manager.disable
            logging.disable(logging.WARNING)
            try:
                converted = float16.convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)
            finally:
                logging.disable(level)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UnsupportedError(f"the model cannot be converted to FP16: {error}") from error
    return converted, notes


def _has_float16(model: Any) -> bool:
    return any(tensor.data_type == _FLOAT16 for tensor in model.graph.initializer)


def _notes(model: Any, kept: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if kept:
        notes.append(f"kept in FP32: {', '.join(kept)}")
    numpy_helper = onnx_library().numpy_helper
    large = [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == _FLOAT and np.abs(numpy_helper.to_array(tensor)).max(initial=0.0) > MAX_FLOAT16
    ]
    if large:
        notes.append(f"weights beyond {MAX_FLOAT16:.0f} are cut off: {', '.join(large)}")
    return tuple(notes)

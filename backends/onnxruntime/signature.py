"""Inputs and outputs of an ONNX Runtime session in the server's words."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype, FileSignature, FileTensor, InternalError, UnsupportedError

log = logging.getLogger(__name__)

_DATATYPES = {
    "bool": Datatype.BOOL,
    "uint8": Datatype.UINT8,
    "uint16": Datatype.UINT16,
    "uint32": Datatype.UINT32,
    "uint64": Datatype.UINT64,
    "int8": Datatype.INT8,
    "int16": Datatype.INT16,
    "int32": Datatype.INT32,
    "int64": Datatype.INT64,
    "float16": Datatype.FP16,
    "float": Datatype.FP32,
    "double": Datatype.FP64,
    "string": Datatype.BYTES,
    "bfloat16": Datatype.BF16,
}
# The default output of scikit-learn's and similar classifiers (ZipMap): for each row a value for each class.
_ROWS_OF_MAPS = re.compile(r"seq\(map\((?:string|int64),tensor\((float|double|int64)\)\)\)")


_WAY_OUT = "export the model with plain tensors (scikit-learn: options={'zipmap': False})"


def session_signature(session: Any, inputs: Collection[str] = (), outputs: tuple[str, ...] = ()) -> FileSignature:
    """The inputs and outputs of `session`; of its outputs only those named, or all that fit a tensor.

    A sequence of maps is such an output: [rows, keys], by ascending keys. An initializer that is also an input of the
    graph is one here if `inputs` names it: requests may replace the stored value.

    Raises UnsupportedError for an input, or a named output, that is a sequence, a map or of a type that KServe lacks.
    """
    wanted = [
        argument
        for argument in session.get_outputs()
        if (argument.name in outputs if outputs else datatype_of(argument.type) is not None)
    ]
    left = [f"'{argument.name}' ({argument.type})" for argument in session.get_outputs() if argument not in wanted]
    if wanted and left and not outputs:
        log.warning("outputs that no tensor can carry are not served: %s; %s", ", ".join(left), _WAY_OUT)
    if not wanted:
        # Every name is wrong, or nothing is a tensor: the whole list makes the better message.
        wanted = session.get_outputs()
    replaceable = [each for each in session.get_overridable_initializers() if each.name in inputs]
    return FileSignature(tuple(map(_tensor, [*session.get_inputs(), *replaceable])), tuple(map(_tensor, wanted)))


def _tensor(argument: Any) -> FileTensor:
    datatype = datatype_of(argument.type)
    if datatype is None:
        raise UnsupportedError(f"'{argument.name}' is a {argument.type}, which no KServe tensor can carry; {_WAY_OUT}")
    if is_rows_of_maps(argument.type):
        return FileTensor(argument.name, datatype, (-1, -1))
    # Symbolic dimensions are strings, unknown ones None.
    return FileTensor(argument.name, datatype, tuple(size if isinstance(size, int) else -1 for size in argument.shape))


def datatype_of(type_name: str) -> Datatype | None:
    """The datatype of an ONNX type such as `tensor(float)`, or of the values in a sequence of maps."""
    rows = _ROWS_OF_MAPS.fullmatch(type_name)
    if rows is not None:
        return _DATATYPES[rows[1]]
    if not type_name.startswith("tensor("):
        return None
    return _DATATYPES.get(type_name[len("tensor(") : -1])


def is_rows_of_maps(type_name: str) -> bool:
    """Whether a value of that type is a map for each row, which `rows_of_maps` makes a tensor of."""
    return _ROWS_OF_MAPS.fullmatch(type_name) is not None


def rows_of_maps(name: str, rows: Any, datatype: Datatype) -> Array:
    """The values of maps with the same keys: [rows, keys], by ascending keys. Raises InternalError for other maps."""
    keys = sorted(rows[0]) if rows else []
    try:
        values = [[row[key] for key in keys] for row in rows]
    except KeyError:
        values = []
    if len(values) != len(rows) or any(len(row) != len(keys) for row in rows):
        raise InternalError(f"output '{name}': the rows are maps with different keys, which no tensor can carry")
    return np.array(values, datatype.numpy).reshape(len(rows), len(keys))

"""Inputs and outputs of an ONNX Runtime session in the server's words."""

from __future__ import annotations

from typing import Any

from modelserver.backend import Datatype, FileSignature, FileTensor, UnsupportedError

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


def session_signature(session: Any, outputs: tuple[str, ...] = ()) -> FileSignature:
    """What `session` takes and gives; of its outputs only those named, or all that are tensors.

    Raises UnsupportedError for an input, or a named output, that is a sequence, a map or of a type that KServe lacks.
    """
    wanted = [
        argument
        for argument in session.get_outputs()
        if (argument.name in outputs if outputs else _datatype(argument.type) is not None)
    ]
    if not wanted:
        # Every name is wrong, or nothing is a tensor: the whole list makes the better message.
        wanted = session.get_outputs()
    return FileSignature(tuple(map(_tensor, session.get_inputs())), tuple(map(_tensor, wanted)))


def _tensor(argument: Any) -> FileTensor:
    datatype = _datatype(argument.type)
    if datatype is None:
        raise UnsupportedError(
            f"'{argument.name}' is a {argument.type}, which no KServe tensor can carry; "
            "export the model with plain tensors (scikit-learn: options={'zipmap': False})"
        )
    # Symbolic dimensions are strings, unknown ones None.
    return FileTensor(argument.name, datatype, tuple(size if isinstance(size, int) else -1 for size in argument.shape))


def _datatype(type_name: str) -> Datatype | None:
    """The datatype of an ONNX type such as `tensor(float)`."""
    if not type_name.startswith("tensor("):
        return None
    return _DATATYPES.get(type_name[len("tensor(") : -1])

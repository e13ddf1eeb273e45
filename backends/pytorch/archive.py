"""The kind of a PyTorch file, by its content, and whether loading it would execute a pickle.

`torch.save` and `torch.jit.save` both write a `.pt`; unpickling runs whatever code the file names, so the two are told
apart before anything is loaded. An exported program is data and JSON, but may embed pickles and other code too. An
AOTInductor package is a library.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .program_text import check_program_text

_WEIGHTS = "data/weights/"
_CONSTANTS = "data/constants/"
# torch.export stores these objects by Python's own pickle.
_OPAQUE_PREFIX = "opaque_obj"
_MODELS = "models/"
_OLD_PROGRAM = "serialized_exported_program.json"
# How TorchScript's code and torch.export's graphs name the operator and the class of Torch-TensorRT.
_TENSORRT_WORDS = (
    b"tensorrt.execute_engine",
    b"tensorrt::execute_engine",
    b"torch.classes.tensorrt",
    b"tensorrt.Engine",
)
_PROGRAM_SUFFIXES = (".py", ".json")
_MAX_PROGRAM_BYTES = 256 << 20

# Whatever zipfile, json and torch raise about damaged bytes: there is no common base but Exception.
DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class FileKind(enum.Enum):
    """The `torch` function that reads the file."""

    TORCHSCRIPT = "TorchScript archive"
    EXPORTED = "torch.export program"
    PACKAGE = "AOTInductor package"
    PICKLE = "pickled checkpoint"


def file_kind(path: Path) -> FileKind:
    """The kind of `path`. Raises InvalidArgumentError if it is none."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            start = file.read(4)
        if start[:1] == pickle.PROTO:
            return FileKind.PICKLE
        reason = "a truncated archive" if start[:2] == b"PK" else f"it starts with {start!r}"
        raise InvalidArgumentError(f"{path} is neither TorchScript nor torch.export: {reason}")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            starts = [entry.header_offset for entry in archive.infolist()]
    except DAMAGE as error:
        raise InvalidArgumentError(
            f"{path} is neither TorchScript nor torch.export: a damaged archive: {error}"
        ) from error
    if min(starts, default=0) > 0:
        # The directory that was found is that of an archive inside: the outer one's is gone.
        raise InvalidArgumentError(f"{path} is neither TorchScript nor torch.export: a truncated archive")
    # torch puts all but the oldest exported programs under one top directory of any name.
    inner = {name.partition("/")[2] for name in names}
    if any(
        name.startswith("data/aotinductor/") for name in inner
    ):  # also beside an exported program: it would be loaded
        return FileKind.PACKAGE
    if _OLD_PROGRAM in names or any(name.startswith("models/") for name in inner):
        return FileKind.EXPORTED
    if "constants.pkl" in inner:
        return FileKind.TORCHSCRIPT
    if "data.pkl" in inner:
        return FileKind.PICKLE
    raise InvalidArgumentError(f"{path} is a zip archive, but neither TorchScript nor torch.export wrote it")


def refuse_code(path: Path) -> None:
    """Raise UnsupportedError if torch.export.load would run anything of `path` that is not a size or an operator.

    That is: unpickle more than tensors in plain containers, or evaluate other text than torch.export writes.
    """
    read = _record_reader(path)
    for name in read.names:
        if posixpath.basename(name).startswith(_OPAQUE_PREFIX):
            raise UnsupportedError(f"{path} holds a pickle in '{name}', which can run any code")
    for name in _torch_records(read):
        try:
            torch.load(io.BytesIO(read.record(name)), weights_only=True)
        except DAMAGE as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(f"{path} holds a pickle in '{name}', which can run any code: {reason}") from error
    for name in read.names:
        if (name.startswith(_MODELS) and name.endswith(".json")) or name == _OLD_PROGRAM:
            check_program_text(json.loads(read.record(name)), where=f"{path}, '{name}',")


def names_tensorrt(path: Path) -> bool:
    """Whether the program calls engines of Torch-TensorRT, which only that library can load."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            is_program = entry.filename.endswith(_PROGRAM_SUFFIXES) and entry.file_size < _MAX_PROGRAM_BYTES
            if is_program and any(word in archive.read(entry) for word in _TENSORRT_WORDS):
                return True
    return False


class _Records:
    """The records of an archive and how to read one."""

    def __init__(self, names: list[str], record: Callable[[str], bytes]) -> None:
        self.names = names
        self.record = record


def _record_reader(path: Path) -> _Records:
    """Records by torch's own reader, so that we see what torch.export.load will see; by zipfile for old files."""
    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))
        return _Records(reader.get_all_records(), reader.get_record)
    except RuntimeError:
        contents = _zip_contents(path)
        return _Records(list(contents), contents.__getitem__)


def _zip_contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _torch_records(read: _Records) -> Iterator[str]:
    """The records that torch.export.load gives to torch.load."""
    for name in read.names:
        if name.endswith(".pt") or name in ("serialized_state_dict.json", "serialized_constants.json"):
            yield name
        for directory, suffix in ((_WEIGHTS, "_weights_config.json"), (_CONSTANTS, "_constants_config.json")):
            if name.startswith(directory) and name.endswith(suffix):
                payloads = json.loads(read.record(name))["config"].values()
                yield from (directory + payload["path_name"] for payload in payloads if payload.get("use_pickle"))


def first_lines(error: BaseException) -> str:
    """The message of an error, without the pages of text that torch appends."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    shown = " ".join(line.strip() for line in lines[:3])[:500]
    return shown if isinstance(error, RuntimeError | ValueError) and shown else f"{type(error).__name__}: {shown}"

"""The header of an engine file, read without any TensorRT library.

    bytes  0-3   magic: `ftrt` TensorRT, `vtrt` TensorRT for RTX
           4-7   version of the serialisation
           8-15  number of entries
          16-23  size of the whole file
          24-27  version of the library that built it: major, minor, patch, build
          28-31  `vtrt` again      } TensorRT for RTX only
          32-39  bit mask of the architectures it was built for }

Numbers are little-endian. The rest of the file has no documented structure, so nothing else is read from it.
"""

from __future__ import annotations

import enum
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend import InvalidArgumentError, NotFoundError

_HEADER = struct.Struct("<4sIQQ4B")
_RTX_TAIL = struct.Struct("<4sQ")
HEAD_BYTES = 64
# Names of the bits of the mask, from bit 0; the bits above have none that is documented.
_ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")


class Flavour(enum.Enum):
    """The libraries that build and run engines; the value is the Python module's name."""

    TENSORRT = "tensorrt"
    RTX = "tensorrt_rtx"

    @property
    def title(self) -> str:
        return "TensorRT" if self is Flavour.TENSORRT else "TensorRT for RTX"


_MAGICS = {b"ftrt": Flavour.TENSORRT, b"vtrt": Flavour.RTX}


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """An engine file by its header; `architectures` is empty where the file does not say."""

    flavour: Flavour
    version: tuple[int, int, int, int]
    size_bytes: int
    architectures: tuple[str, ...] = ()

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def read_header(path: Path) -> PlanHeader:
    """The header of an engine file.

    Raises NotFoundError without a file, InvalidArgumentError for a file that is not an engine, or not a whole one.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise NotFoundError(f"unable to find '{path}'") from error
    except OSError as error:
        raise InvalidArgumentError(
            f"{path}: expected an engine file, which cannot be read: {error.strerror}"
        ) from error
    return parse_header(head, file_bytes, path)


def parse_header(head: bytes, file_bytes: int, path: Path) -> PlanHeader:
    """The header in the first bytes of a file of `file_bytes`; raises InvalidArgumentError as `read_header`."""
    if len(head) < _HEADER.size:
        raise InvalidArgumentError(
            f"{path}: expected a TensorRT engine of at least {_HEADER.size} bytes, got {len(head)}; "
            "the file is empty or was cut off: copy or build it again (modelserver build-engine)"
        )
    magic, _, _, size_bytes, *version = _HEADER.unpack_from(head)
    flavour = _MAGICS.get(magic)
    if flavour is None:
        raise InvalidArgumentError(
            f"{path}: expected a TensorRT engine, which begins with 'ftrt' or 'vtrt', got {_guess(head)}"
        )
    if size_bytes != file_bytes:
        what = "was cut off" if file_bytes < size_bytes else "has bytes too many"
        raise InvalidArgumentError(
            f"{path}: expected {size_bytes} bytes, as the engine's header says, got {file_bytes}: the file {what}; "
            "copy or build it again (modelserver build-engine)"
        )
    major, minor, patch, build = version
    return PlanHeader(flavour, (major, minor, patch, build), size_bytes, _architectures(flavour, head))


def _architectures(flavour: Flavour, head: bytes) -> tuple[str, ...]:
    if flavour is not Flavour.RTX or len(head) < _HEADER.size + _RTX_TAIL.size:
        return ()
    magic, mask = _RTX_TAIL.unpack_from(head, _HEADER.size)
    if magic != b"vtrt":
        return ()
    return tuple(name for bit, name in enumerate(_ARCHITECTURES) if mask >> bit & 1)


def _guess(head: bytes) -> str:
    """A guess at what kind of file the bytes are."""
    if head.startswith(b"PK\x03\x04"):
        return 'a zip archive, such as PyTorch writes (backend: "pytorch")'
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer: run 'git lfs pull'"
    if head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x1a", b"\x22", b"\x3a"):
        return "what looks like an ONNX file: name it model.onnx, and an engine is built from it"
    return f"the bytes {head[:4].hex(' ')}"

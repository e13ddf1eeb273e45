"""Packed weights in files: a load whose packing takes long keeps what it made, and later loads read that.

A file holds the layers of one network as the kernels in C multiply them, so that reading it is all there is to do. It
is read into memory of the process's own, not mapped: weights that are mapped lie in small pages, which are read a third
slower, and whoever shortens a mapped file ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from modelserver.backend import UnavailableError

from ..checkpoint import Checkpoint, open_checkpoint
from ..compute_thread import compute_aside
from ..kernels import packed_kernels_for
from ..models.linear import GroupedLinear, Linear, TokenEmbedding
from ..models.linear_tensors import LinearTensors, Rank
from ..models.packed_matrix import (
    Form,
    PackedExperts,
    PackedMatrix,
    PackedMatrixEmbedding,
    PackedMatrixLinear,
    SideBySide,
)
from ..options import EngineOptions
from .scheme import Scheme

logger = logging.getLogger(__name__)

# Of a file: this, the length and the checksum of a JSON document in 8 bytes each, that document, and the tensors.
_MAGIC = b"llm weights 1\n\0\0"
_SUFFIX = ".weights"
# Others have files with that suffix, too.
_NAME = re.compile(r"[0-9a-f]{32}\.weights")
_UNFINISHED = ".unfinished-"
_MOST_DOCUMENT = 1 << 28
# Tensors begin at a line of the processor's cache.
_ALIGNMENT = 64
# A file is kept if it is as large, and reading it saves as much, at the bytes a second that reading and checking reach.
# Measured: packing blocks of GGUF takes no longer than that; rounding, and packing GPTQ and AWQ, 3 to 6 times that.
_LEAST_BYTES = 16 << 20
_LEAST_SECONDS = 0.5
_BYTES_A_SECOND = 1.5e9
# What a disk must have room for after a file was written, of its size.
_ROOM_LEFT = 1.0
# Of files that are being written: older ones are left from a process that died.
_STALE_S = 24 * 3600.0
_GIB = 1 << 30

_NUMBERS = ("form", "num_outputs", "num_inputs", "width", "group", "scale_each", "min_each")
_TENSORS = ("codes", "scales", "zeros", "mins", "scale_factors", "min_factors", "table", "order")

_AnyLayer = TypeVar("_AnyLayer", Linear, GroupedLinear, TokenEmbedding)


class KeptScheme(Scheme):
    """Layers as another scheme makes them, from the file of an earlier load where that has them."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:  # noqa: ARG003 - nothing asks for it
        raise AssertionError("it is made of another scheme")

    def __init__(self, scheme: Scheme, digest: bytes, path: Path, most_bytes: float) -> None:
        """`digest` is the checkpoint's. Reads the file at `path`, if there is one; all files have `most_bytes`."""
        self._scheme = scheme
        self._digest = digest
        self._path = path
        self._most_bytes = most_bytes
        self._layers = _read(path)
        self._made: dict[str, list[list[PackedMatrixLinear]]] = {}
        self._seconds = 0.0

    @property
    def is_read(self) -> bool:
        """Whether a file of an earlier load was read."""
        return bool(self._layers)

    @property
    def has_codes(self) -> bool:
        return self._scheme.has_codes

    def skips(self, name: str) -> bool:
        return self._scheme.skips(name)

    def dense(self, tensors: LinearTensors) -> torch.Tensor:
        return self._scheme.dense(tensors)

    def linear(self, tensors: LinearTensors) -> Linear:
        return self._scheme.linear(tensors)

    def make_linear(self, tensors: LinearTensors) -> Linear:
        kept = self._layers.get(_key("linear", [tensors]))
        if kept is not None:
            return kept.linear()
        return self._timed("linear", [tensors], lambda: self._scheme.make_linear(tensors))

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        kept = self._layers.get(_key("grouped", experts))
        if kept is not None:
            return kept.grouped()
        return self._timed("grouped", experts, lambda: self._scheme.make_grouped(experts))

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:
        kept = self._layers.get(_key("embedding", [tensors]))
        if kept is not None:
            return PackedMatrixEmbedding(kept.parts[0][0].matrix, tensors.dtype)
        return self._timed("embedding", [tensors], lambda: self._scheme.embedding(tensors))

    def tied_head(self, tensors: LinearTensors, embedding: TokenEmbedding) -> Linear:
        return self._scheme.tied_head(tensors, embedding)

    def _timed(self, kind: str, tensors: Sequence[LinearTensors], make: Callable[[], _AnyLayer]) -> _AnyLayer:
        began = time.perf_counter()
        layer = make()
        self._seconds += time.perf_counter() - began
        if parts := _packed_parts(layer):
            self._made[_key(kind, tensors)] = parts
        return layer

    def keep(self, checkpoint: Checkpoint) -> None:
        """Write the file if a later load gains from it, now that all layers are made. No fault of a disk is raised.

        Not of a checkpoint that has changed since its digest was taken, before it was read.
        """
        layers, self._made = self._made, {}
        num_bytes = sum(part.num_bytes for parts in layers.values() for each in parts for part in each)
        if (
            self.is_read
            or not layers
            or num_bytes < _LEAST_BYTES
            or self._seconds < _LEAST_SECONDS + num_bytes / _BYTES_A_SECOND
        ):
            return
        if num_bytes > self._most_bytes:
            logger.info("packed weights of %d bytes are not kept: kept_weights_gb is less", num_bytes)
            return
        began = time.perf_counter()
        try:
            with open_checkpoint(checkpoint.place) as again:
                if again.digest != self._digest:
                    logger.warning("%s has changed while it was loaded: its packed weights are not kept", again.place)
                    return
            _make_room(self._path, num_bytes, self._most_bytes)
            _write(self._path, layers)
        except (OSError, UnavailableError) as error:
            logger.warning("packed weights of %s are not kept: %s", checkpoint.place, error)
            return
        seconds = time.perf_counter() - began
        message = "packing %s took %.1f s: the result, %.1f MB, is kept in %s (written in %.1f s)"
        logger.info(message, checkpoint.place, self._seconds, num_bytes / 1e6, self._path, seconds)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Of each expert, its parts side by side; of other layers, of the only one."""

    parts: list[list[PackedMatrixLinear]]

    def linear(self) -> Linear:
        (parts,) = self.parts
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def grouped(self) -> GroupedLinear:
        return PackedExperts(self.parts)


def keeping(
    checkpoint: Checkpoint,
    scheme: Scheme,
    options: EngineOptions,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank,
) -> KeptScheme | None:
    """A scheme that reads and keeps packed weights; None where they are not kept: on a GPU, without kernels, with
    `kept_weights_gb` 0, for a user without a home, and of schemes of installed packages, whose code nothing here knows.
    """
    kernels = packed_kernels_for(device)
    directory = _directory(options.kept_weights_directory)
    if directory is None:
        return None
    if kernels is None or not options.kept_weights_gb or not type(scheme).__module__.startswith(f"{__package__}."):
        return None
    state = [_code_digest(), torch.__version__, type(scheme).__name__, str(dtype), kernels.instructions()[0]]
    predicts = options.speculative_config is not None and options.speculative_config.method == "mtp"
    state += [str(kernels.lanes()), f"{rank.index} of {rank.size}", f"with a draft head: {predicts}"]
    digest = checkpoint.digest
    key = hashlib.blake2b(digest + "\n".join(state).encode(), digest_size=16, person=b"llm weights")
    path = directory / f"{key.hexdigest()}{_SUFFIX}"
    return KeptScheme(scheme, digest, path, options.kept_weights_gb * _GIB)


@functools.cache
def _code_digest() -> str:
    """Of all that makes the bytes: readers of formats, rounding, packing and the kernels."""
    state = hashlib.blake2b(digest_size=16)
    room = Path(__file__).parent.parent
    files = [path for part in ("checkpoint", "models", "quantization") for path in (room / part).rglob("*.py")]
    for path in sorted([*files, *room.glob("_packed_linear*"), room / "kernels.py"]):
        state.update(hashlib.blake2b(path.read_bytes()).digest())
    return state.hexdigest()


def _directory(chosen: str | None) -> Path | None:
    """None: it is in the home of a user who has none, as containers may have."""
    with contextlib.suppress(RuntimeError):
        if chosen is not None:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelserver" / "weights"
    return None


def _key(kind: str, tensors: Sequence[LinearTensors]) -> str:
    names = [name for each in tensors for name in each.names]
    if len(tensors) > 1:  # names of all experts would be a large part of a file
        names = [names[0], str(len(names)), hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()]
    return " ".join([kind, tensors[0].split.value, *names])


def _packed_parts(layer: object) -> list[list[PackedMatrixLinear]]:
    """What `_Layer` has; empty for a layer that has parts of another kind."""
    match layer:
        case PackedMatrixLinear():
            return [[layer]]
        case SideBySide():
            return [list(layer.linears)]
        case PackedExperts():
            return [list(parts) for parts in layer.experts]
        case PackedMatrixEmbedding():
            return [[PackedMatrixLinear(layer.matrix, None)]]
    return []


# The file.


def _write(path: Path, layers: Mapping[str, list[list[PackedMatrixLinear]]]) -> None:
    """Raises OSError. Whoever reads it meanwhile has the old file or the new one, and never a part."""
    tensors: list[torch.Tensor] = []
    size = 0

    def place(tensor: torch.Tensor) -> list[Any]:
        nonlocal size
        tensors.append(tensor.contiguous())
        start, size = size, size + tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]

    def described(linear: PackedMatrixLinear) -> dict[str, Any]:
        found: dict[str, Any] = {name: int(getattr(linear.matrix, name)) for name in _NUMBERS}
        for name in _TENSORS:
            value = getattr(linear.matrix, name)
            if value is not None:
                found[name] = place(value) if isinstance(value, torch.Tensor) else value
        return found if linear.bias is None else {**found, "bias": place(linear.bias)}

    known = {key: [[described(part) for part in each] for each in parts] for key, parts in layers.items()}
    checksums = [zlib.crc32(_bytes(tensor)) for tensor in tensors]
    document = json.dumps({"name": path.name, "layers": known, "checksums": checksums, "size": size}).encode()
    head = len(document).to_bytes(8, "little") + zlib.crc32(document).to_bytes(8, "little")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Another server may write the same: each its own file, and the last one stays.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_UNFINISHED, suffix=_SUFFIX, delete=False) as file:
        try:
            file.write(_MAGIC + head + document)
            for tensor in tensors:
                file.write(_bytes(tensor))
                file.write(bytes(-tensor.nbytes % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _read(path: Path) -> Mapping[str, _Layer]:
    """The layers of a file; none if it is not there, or not as it was written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    except OSError:
        return {}
    try:
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # it was used now
        began = time.perf_counter()
        layers = _layers(descriptor, path.name)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        logger.warning("%s cannot be used, so weights are packed again: %s", path, error)
        return {}
    finally:
        os.close(descriptor)
    logger.info("packed weights are read from %s (%.1f s)", path, time.perf_counter() - began)
    return layers


def _layers(descriptor: int, name: str) -> Mapping[str, _Layer]:
    """Raises OSError and ValueError. The kernels read what a file says without asking again: it must be of this user,
    and have the name that it was written with."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ValueError("it is not a file of this user")
    head = os.read(descriptor, len(_MAGIC) + 16)
    length, checksum = (int.from_bytes(head[at : at + 8], "little") for at in (len(_MAGIC), len(_MAGIC) + 8))
    if not head.startswith(_MAGIC) or length > _MOST_DOCUMENT:
        raise ValueError("it is no file of packed weights")
    document, first = os.pread(descriptor, length, len(head)), len(head) + length
    if zlib.crc32(document) != checksum:
        raise ValueError("its description has not the checksum that was written")
    known = json.loads(document)
    if known["name"] != name:
        raise ValueError(f"it was written as {known['name']!r:.60}")
    if status.st_size != first + known["size"]:
        raise ValueError(f"it has {status.st_size} bytes, and was written with {first + known['size']}")
    memory = torch.empty(known["size"], dtype=torch.uint8)
    places: list[tuple[int, int]] = []

    def tensor(described: list[Any]) -> torch.Tensor:
        name, shape, start = described
        dtype: torch.dtype = getattr(torch, name)
        num_bytes = dtype.itemsize * functools.reduce(int.__mul__, shape, 1)
        places.append((start, num_bytes))
        return memory[start : start + num_bytes].view(dtype).view(shape)

    kernels = packed_kernels_for(memory.device)
    assert kernels is not None, "`keeping` has asked"

    def linear(described: dict[str, Any]) -> PackedMatrixLinear:
        values = {name: tensor(each) if isinstance(each, list) else each for name, each in described.items()}
        bias = values.pop("bias", None)
        return PackedMatrixLinear(PackedMatrix(kernels=kernels, **values | {"form": Form(values["form"])}), bias)

    layers = {
        key: _Layer([[linear(part) for part in each] for each in parts]) for key, parts in known["layers"].items()
    }
    view = memoryview(memory.numpy())

    def check(place: tuple[int, int]) -> int:
        start, num_bytes = place
        part = view[start : start + num_bytes]
        at = 0
        while at < num_bytes:
            count = os.preadv(descriptor, [part[at:]], first + start + at)
            if not count:
                raise ValueError("it ends early")
            at += count
        return zlib.crc32(part)

    if list(compute_aside(check, places)) != known["checksums"]:
        raise ValueError("its tensors have not the checksums that were written")
    return layers


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _make_room(path: Path, num_bytes: int, most_bytes: float) -> None:
    """Remove files that were not used for longest, and what dead processes left. Raises OSError without room."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = []
    for other in path.parent.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = other.stat()
            if other.name.startswith(_UNFINISHED):
                if time.time() - status.st_mtime > _STALE_S:
                    other.unlink()
            elif other != path and _NAME.fullmatch(other.name):
                found.append((status.st_mtime, status.st_size, other))
    total = sum(size for _, size, _ in found) + num_bytes
    for _, size, other in sorted(found):
        if total <= most_bytes:
            break
        logger.info("%s is removed: kept_weights_gb is less than all files", other)
        other.unlink(missing_ok=True)
        total -= size
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes * (1 + _ROOM_LEFT):
        raise UnavailableError(f"{path.parent} has {free} bytes free, and twice the file's {num_bytes} are wanted")

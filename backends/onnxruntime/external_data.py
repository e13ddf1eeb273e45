"""Where an ONNX file keeps weights outside of itself, found without reading the weights or the onnx package.

A model may only name files of its own version directory: with other paths, the author of a model could read any file
that the server can read. ONNX Runtime refuses such paths since 1.24; older versions do not refuse all of them.

The file is one protobuf message (onnx.proto); what follows knows just the fields that lead to tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from modelserver.backend import InvalidArgumentError

# Fields that hold messages on the way to tensors, by message: {number: message}.
_PATHS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA = 13  # of a tensor: key-value entries
_KEY, _VALUE = 1, 2
_LOCATION = b"location"
_MAX_DEPTH = 64
_MAX_VARINT = 10

Bytes = bytes | mmap.mmap


def external_locations(content: Bytes) -> set[str]:
    """The files that a model's tensors lie in, as it names them. Of a damaged file, those before the damage."""
    found: set[str] = set()
    if content.find(_LOCATION) < 0:
        return found  # most files: it is not worth the walk
    # The parts still to read: message, begin, end, depth.
    waiting = [("model", 0, len(content), 0)]
    while waiting:
        message, begin, end, depth = waiting.pop()
        for number, first, last in _fields(content, begin, end):
            if message == "tensor":
                if number == _EXTERNAL_DATA:
                    found |= _location(content, first, last)
            elif (inner := _PATHS[message].get(number)) is not None and depth < _MAX_DEPTH:
                waiting.append((inner, first, last, depth + 1))
    return found


def check_external_data(path: Path, root: Path) -> None:
    """Raise InvalidArgumentError if the model at `path` keeps weights outside of `root`, or in no plain file."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        locations = external_locations(content)
    allowed = root.resolve()
    for location in sorted(locations):
        if "\0" in location:
            raise InvalidArgumentError(f"{path} names external data in {location!r}, which is not a path")
        target = (path.parent / location).resolve()
        if Path(location).is_absolute() or not target.is_relative_to(allowed):
            raise InvalidArgumentError(
                f"{path} keeps weights in '{location}', outside of {root}; put the file beside the model"
            )
        if not target.is_file():
            raise InvalidArgumentError(f"{path} keeps weights in '{location}', and there is no file {target}")


def _location(content: Bytes, begin: int, end: int) -> set[str]:
    """The value of an entry whose key is `location`."""
    entry = {number: bytes(content[first:last]) for number, first, last in _fields(content, begin, end)}
    if entry.get(_KEY) != _LOCATION:
        return set()
    return {entry.get(_VALUE, b"").decode("utf-8", "surrogateescape")}


def _fields(content: Bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field with a length in a message; ends where the message makes no sense."""
    at = begin
    while at < end:
        key, at = _varint(content, at, end)
        match key & 7:  # the wire type
            case 0:
                _, at = _varint(content, at, end)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(content, at, end)
                if at + length > end:
                    return
                yield key >> 3, at, at + length
                at += length
            case _:
                return


def _varint(content: Bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; past `end` when it is cut off or too long."""
    value = 0
    for position in range(min(_MAX_VARINT, end - at)):
        byte = content[at + position]
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, at + position + 1
    return 0, end + 1

"""JSON text of any size, parsed and written in pieces.

A parser holds the interpreter's lock, and other threads must run. The nesting of the text and the number of its values
are bounded before anything is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import orjson

from modelserver.core import accelerator
from modelserver.core.large_buffers import prepare_heap
from modelserver.core.long_work import Slices, finish
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError

Text = bytes | bytearray | memoryview

# Always matches from a quote on, closed string or not, so that hostile text takes only linear time.
STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
_BLOCK = 1 << 20
# Bytes of a long document that are parsed at a time: some 3 ms at worst.
_PIECE_BYTES = 16 * 1024
_MAX_KEY_BYTES = 64 * 1024
# Bytes of a long string that are parsed at a time: less than a millisecond.
_LONG_STRING_BYTES = 256 * 1024
# Characters and whole escapes; the last of them may be half of a character, or of a pair of surrogates.
_CHARACTERS = re.compile(rb'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
# Of a document that is written.
_FRAGMENTS_OF_SLICE = 1024
_CLOSERS = {b"[": b"]", b"{": b"}"}
_SPACE = b" \t\n\r"
_KEY = re.compile(rb'[ \t\n\r]*("(?:[^"\\]++|\\.)*+")[ \t\n\r]*:', re.DOTALL)


def check_depth(text: bytes | bytearray, max_depth: int) -> None:
    """Raise InvalidArgumentError when objects and arrays nest deeper than `max_depth`; parses nothing."""
    # The depth is at most the number of brackets: almost every request ends here.
    if text.count(b"[") + text.count(b"{") <= max_depth:
        return
    brackets = np.frombuffer(STRING.sub(b"", text), np.uint8)
    depth = 0
    for start in range(0, len(brackets), _BLOCK):
        block = brackets[start : start + _BLOCK]
        opened = (block == ord("[")) | (block == ord("{"))
        closed = (block == ord("]")) | (block == ord("}"))
        depths = np.cumsum(opened.astype(np.int32) - closed.astype(np.int32)) + depth
        if depths.max() > max_depth:
            raise InvalidArgumentError(f"JSON nesting depth exceeds maximum allowed limit ({max_depth})")
        depth = int(depths[-1])


def parse_pieces(text: Text, *, max_depth: int, max_values: int) -> Any:
    """Parse a document of any size. Raises InvalidArgumentError, PayloadTooLargeError."""
    return finish(parse_slices(text, max_depth=max_depth, max_values=max_values))


def parse_slices(text: Text, *, max_depth: int, max_values: int) -> Slices[Any]:
    """As `parse_pieces`, in slices."""
    yield
    if accelerator.measure_json is None:
        check_depth(bytes(text), max_depth)
        _check_values(_num_values(bytes(text)), max_values)
        return _loads(text)
    state, num_values = accelerator.measure_json(text, max_depth)
    if state == accelerator.TOO_DEEP:
        raise InvalidArgumentError(f"JSON nesting depth exceeds maximum allowed limit ({max_depth})")
    if state == accelerator.NOT_WHOLE:
        raise InvalidArgumentError("the request's JSON is malformed: a string, an array or an object has no end")
    _check_values(num_values, max_values)
    return (yield from document_slices(memoryview(text)))


def _check_values(num_values: int, max_values: int) -> None:
    if num_values > max_values:
        raise PayloadTooLargeError(
            f"the request's JSON may have {num_values} values, at most {max_values} are allowed; send "
            "large tensors to /infer"
        )


def _num_values(text: bytes) -> int:
    """As `accelerator.measure_json` counts them."""
    structure = STRING.sub(b"", text)
    return sum(map(structure.count, (b",", b":", b"[", b"{")))


def text_slices(document: Any) -> Slices[list[bytes]]:
    """The JSON text of a document of strings, numbers, lists and dictionaries, in parts."""
    parts, part = [], bytearray()
    for number, fragment in enumerate(_fragments(document)):
        part += fragment
        if len(part) >= _LONG_STRING_BYTES:
            parts.append(bytes(part))
            part.clear()
            yield
        elif number % _FRAGMENTS_OF_SLICE == 0:
            yield
    return [*parts, bytes(part)]


def _fragments(value: Any) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) > _LONG_STRING_BYTES:
        yield b'"'
        for start in range(0, len(value), _LONG_STRING_BYTES):
            yield orjson.dumps(value[start : start + _LONG_STRING_BYTES])[1:-1]
        yield b'"'
    elif isinstance(value, dict) and value:
        mark = b"{"
        for name, member in value.items():
            yield mark + orjson.dumps(name) + b":"
            yield from _fragments(member)
            mark = b","
        yield b"}"
    elif isinstance(value, list) and value:
        mark = b"["
        for item in value:
            yield mark
            yield from _fragments(item)
            mark = b","
        yield b"]"
    else:
        yield orjson.dumps(value)


def document_slices(text: memoryview) -> Slices[Any]:
    """Parse a document whose nesting is bounded, in pieces. Raises InvalidArgumentError."""
    yield
    whole = stripped(text)
    opener = bytes(whole[:1])
    if opener == b'"' and len(whole) > _LONG_STRING_BYTES:
        return (yield from _string_slices(whole))
    if len(whole) <= _PIECE_BYTES or opener not in _CLOSERS or accelerator.cut_members is None:
        return _loads(whole)
    ends = accelerator.cut_members(whole, _PIECE_BYTES)
    closer = _CLOSERS[opener]
    if ends is None or whole[-1:] != closer:
        raise InvalidArgumentError("the request's JSON is malformed: brackets do not match")
    yield
    start = 1
    found: Any = [] if opener == b"[" else {}
    places = np.frombuffer(ends, np.int64).tolist()
    for end in places:
        piece = whole[start:end]
        if end != places[-1] and not stripped(piece):
            raise InvalidArgumentError("the request's JSON is malformed: a member is missing")
        if len(piece) > 2 * _PIECE_BYTES:
            yield from _add_member(found, piece)
        else:
            members = _loads(b"".join((opener, piece, closer)))
            if start > 1 and not members:
                raise InvalidArgumentError("the request's JSON is malformed: a member is missing")
            found.extend(members) if opener == b"[" else found.update(members)
        start = end + 1
        yield
    return found


def _string_slices(text: memoryview) -> Slices[str]:
    """Parse a long string in pieces that end between two characters."""
    pieces: list[str] = []
    start = 1
    while start < len(text) - 1:
        window = text[start : min(start + _LONG_STRING_BYTES, len(text) - 1)]
        size = _CHARACTERS.match(window).end()  # type: ignore[union-attr]  # it matches no characters, too
        if start + size < len(text) - 1:
            if _HIGH_SURROGATE.match(window[size - 6 : size]):
                size -= 6  # its other half comes next
            while size > 0 and window[size - 1] & 0xC0 == 0x80:  # within a character, perhaps: cut before it
                size -= 1
            size -= size > 0 and window[size - 1] >= 0xC0
        if size <= 0:
            break
        pieces.append(_loads(b"".join((b'"', window[:size], b'"'))))
        start += size
        yield
    if start < len(text) - 1 or bytes(text[-1:]) != b'"':
        pieces.append(_loads(b"".join((b'"', text[start : start + _LONG_STRING_BYTES]))))  # which reports the error
    prepare_heap(len(text))
    yield
    return "".join(pieces)


def _add_member(found: Any, member: memoryview) -> Slices[None]:
    """Add one long member to an array or an object."""
    if isinstance(found, list):
        found.append((yield from document_slices(member)))
        return
    key = key_of(member)
    found[_loads(key[1])] = yield from document_slices(member[key.end() :])


def key_of(member: memoryview) -> re.Match[bytes]:
    """The key of an object's member as its first group, and the colon. Raises InvalidArgumentError."""
    key = _KEY.match(member[:_MAX_KEY_BYTES])
    if key is None:
        raise InvalidArgumentError(
            f"the request's JSON is malformed: a key is missing, or longer than {_MAX_KEY_BYTES} bytes"
        )
    return key


def stripped(text: memoryview) -> memoryview:
    """The text without the blanks around it, which are removed in pieces."""
    while text and not (left := bytes(text[:_PIECE_BYTES]).lstrip(_SPACE)):
        text = text[_PIECE_BYTES:]
    if text:
        text = text[min(_PIECE_BYTES, len(text)) - len(left) :]
    while text and not (right := bytes(text[-_PIECE_BYTES:]).rstrip(_SPACE)):
        text = text[:-_PIECE_BYTES]
    if text:
        text = text[: len(text) - min(_PIECE_BYTES, len(text)) + len(right)]
    return text


def _loads(text: Text) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error

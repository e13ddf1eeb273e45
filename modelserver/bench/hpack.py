"""HPACK (RFC 7541) as a client needs it: one request head sent again and again, and response heads read.

The bench has a decoder of its own: a server is not to be measured, and checked, by its own code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache

Field = tuple[bytes, bytes]

DEFAULT_TABLE_BYTES = 4096
ENTRY_OVERHEAD = 32
TABLE_SIZE_ZERO = b"\x20"

# RFC 7541, appendix A.
_STATIC_FIELDS = """\
:authority=
:method=GET
:method=POST
:path=/
:path=/index.html
:scheme=http
:scheme=https
:status=200
:status=204
:status=206
:status=304
:status=400
:status=404
:status=500
accept-charset=
accept-encoding=gzip, deflate
accept-language=
accept-ranges=
accept=
access-control-allow-origin=
age=
allow=
authorization=
cache-control=
content-disposition=
content-encoding=
content-language=
content-length=
content-location=
content-range=
content-type=
cookie=
date=
etag=
expect=
expires=
from=
host=
if-match=
if-modified-since=
if-none-match=
if-range=
if-unmodified-since=
last-modified=
link=
location=
max-forwards=
proxy-authenticate=
proxy-authorization=
range=
referer=
refresh=
retry-after=
server=
set-cookie=
strict-transport-security=
transfer-encoding=
user-agent=
vary=
via=
www-authenticate="""
STATIC_TABLE: tuple[Field, ...] = tuple(
    (name, value) for name, _, value in (line.encode().partition(b"=") for line in _STATIC_FIELDS.splitlines())
)

# RFC 7541, appendix B: how many bits the code of each byte has, the end mark last. The codes follow from the
# lengths: shorter ones first, equal ones in the order of the bytes.
_CODE_LENGTHS = (
    "13 23 28*7 24 30 28*2 30 28*8 30 28*9 6 10*2 12 13 6 8 11 10*2 8 11 8 6*3 5*3 6*7 7 8 15 6 12 10 13 6 7*22 8 7 8 "
    "13 19 13 14 6 15 5 6 5 6 5 6*3 5 7*2 6*3 5 6 7 6 5*2 6 7*5 15 11 14 13 28 20 22 20*2 22*3 23 22 23*5 24 23 24*2 "
    "22 23 24 23*4 21 22 23 22 23*2 24 22 21 20 22*2 23*2 21 23 22*2 24 21 22 23*2 21*2 22 21 23 22 23*2 20 22*3 23 "
    "22*2 23 26*2 20 19 22 23 22 25 26*3 27*2 26 24 25 19 21 26 27*2 26 27 24 21*2 26*2 28 27*3 20 24 20 21 22 21*2 "
    "23 22*2 25*2 24*2 26 23 26 27 26*2 27*5 28 27*5 26 30"
)
_END_MARK = 256


class HpackError(Exception):
    """The peer's header block cannot be read; the connection cannot go on."""


class Decoder:
    """Reads header blocks of one connection, in order."""

    def __init__(self) -> None:
        self._entries: deque[Field] = deque()
        self._num_bytes = 0
        self._max_bytes = DEFAULT_TABLE_BYTES
        # Grows whenever the dynamic table changes: what was remembered of equal blocks is void then.
        self.generation = 0

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a block. Raises HpackError."""
        try:
            return list(self._fields(block))
        except IndexError:
            raise HpackError("a header block ends in the middle of a field") from None

    def _fields(self, block: bytes) -> Iterator[Field]:
        offset = 0
        while offset < len(block):
            first = block[offset]
            if first & 0x80:
                index, offset = _read_int(block, offset, 7)
                yield self._at(index)
                continue
            if first & 0xE0 == 0x20:
                size, offset = _read_int(block, offset, 5)
                self._resize(size)
                continue
            is_kept = bool(first & 0x40)
            index, offset = _read_int(block, offset, 6 if is_kept else 4)
            if index:
                name = self._at(index)[0]
            else:
                name, offset = _read_string(block, offset)
            value, offset = _read_string(block, offset)
            if is_kept:
                self._add((name, value))
            yield name, value

    def _at(self, index: int) -> Field:
        if 0 < index <= len(STATIC_TABLE):
            return STATIC_TABLE[index - 1]
        place = index - len(STATIC_TABLE) - 1
        if not 0 <= place < len(self._entries):
            raise HpackError(f"a header block names entry {index}, which is not in the table")
        return self._entries[place]

    def _add(self, field: Field) -> None:
        self.generation += 1
        self._entries.appendleft(field)
        self._num_bytes += _size(field)
        self._evict()

    def _resize(self, size: int) -> None:
        if size > DEFAULT_TABLE_BYTES:
            raise HpackError(f"the peer wants a table of {size} bytes, {DEFAULT_TABLE_BYTES} are allowed")
        self._max_bytes = size
        self._evict()

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes:
            self.generation += 1
            self._num_bytes -= _size(self._entries.pop())


class RequestHead:
    """The header block of a request that is sent many times: long the first time, a few indexes afterwards."""

    def __init__(self, fields: Sequence[Field], *, table_bytes: int = DEFAULT_TABLE_BYTES) -> None:
        """`table_bytes` is what the peer allows; where the fields do not fit, they are sent as literals."""
        allowed = min(table_bytes, DEFAULT_TABLE_BYTES)
        shrink = _write_int(allowed, 5, 0x20) if allowed < DEFAULT_TABLE_BYTES else b""
        kept = [field for field in fields if field not in STATIC_TABLE]
        is_kept = sum(map(_size, kept)) <= allowed
        first, again = [], []
        # The newest entry of the dynamic table has the lowest index.
        index = len(STATIC_TABLE) + len(kept)
        for field in fields:
            if field in STATIC_TABLE:
                first.append(bytes([0x80 | STATIC_TABLE.index(field) + 1]))
                again.append(first[-1])
                continue
            first.append(_literal(field, 0x40 if is_kept else 0x00))
            again.append(_write_int(index, 7, 0x80) if is_kept else first[-1])
            index -= 1
        self.first = shrink + b"".join(first)
        self.again = b"".join(again)


def _size(field: Field) -> int:
    return len(field[0]) + len(field[1]) + ENTRY_OVERHEAD


def _literal(field: Field, first: int) -> bytes:
    name, value = field
    names = [entry[0] for entry in STATIC_TABLE]
    if name in names:
        start = _write_int(names.index(name) + 1, 6 if first else 4, first)
    else:
        start = bytes([first]) + _write_int(len(name), 7, 0) + name
    return start + _write_int(len(value), 7, 0) + value


def _write_int(number: int, prefix_bits: int, first: int) -> bytes:
    limit = (1 << prefix_bits) - 1
    if number < limit:
        return bytes([first | number])
    number -= limit
    octets = [first | limit]
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


def _read_int(block: bytes, offset: int, prefix_bits: int) -> tuple[int, int]:
    limit = (1 << prefix_bits) - 1
    number = block[offset] & limit
    offset += 1
    if number < limit:
        return number, offset
    shift = 0
    while True:
        octet = block[offset]
        offset += 1
        number += (octet & 0x7F) << shift
        shift += 7
        if not octet & 0x80:
            return number, offset
        if shift > 28:
            raise HpackError("an integer of a header block is too large")


def _read_string(block: bytes, offset: int) -> tuple[bytes, int]:
    is_huffman = bool(block[offset] & 0x80)
    length, offset = _read_int(block, offset, 7)
    end = offset + length
    if end > len(block):
        raise HpackError("a header block ends in the middle of a string")
    raw = block[offset:end]
    return (_from_huffman(raw) if is_huffman else raw), end


def _from_huffman(raw: bytes) -> bytes:
    codes = _codes()
    found = bytearray()
    code, length = 0, 0
    for octet in raw:
        for shift in range(7, -1, -1):
            code = code << 1 | octet >> shift & 1
            length += 1
            symbol = codes.get((length, code))
            if symbol is None:
                continue
            if symbol == _END_MARK:
                raise HpackError("a Huffman string holds the end mark")
            found.append(symbol)
            code, length = 0, 0
    if length > 7 or code != (1 << length) - 1:
        raise HpackError("a Huffman string is padded with something else than ones")
    return bytes(found)


@cache
def _codes() -> dict[tuple[int, int], int]:
    """(length, code) -> byte."""
    lengths: list[int] = []
    for word in _CODE_LENGTHS.split():
        length, _, times = word.partition("*")
        lengths += [int(length)] * int(times or 1)
    codes = {}
    code, previous = 0, 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - previous
        previous = lengths[symbol]
        codes[previous, code] = symbol
        code += 1
    return codes

"""Header compression (RFC 7541): a decoder made for speed and bounded work, and an encoder that keeps no state.

The decoder knows blocks and fields; `head.py` has the rules for fields of requests.
"""

from __future__ import annotations

from typing import Final

from modelserver.wire.http2 import hpack_tables
from modelserver.wire.http2.hpack_tables import STATIC_TABLE, Field

# A dynamic table of another size than the default is announced by the encoder at the start of a block; one of size
# 0 suits us for good, because we never insert.
TABLE_SIZE_UPDATE: Final = b"\x20"

# The overhead of each field in tables and lists (RFC 7541, 4.1; RFC 9113, 6.5.2).
_FIELD_OVERHEAD: Final = 32
# A list this many times over its limit is not even read to its end.
_HARD_FACTOR: Final = 4
# Numbers have at most this many bytes after their first: 2^28 is more than anything here can be.
_MAX_NUMBER_SHIFT: Final = 7 * 3
_FIRST_DYNAMIC: Final = len(STATIC_TABLE) + 1
# Index 0 is an error. It counts as too large for any list, so that one comparison finds both.
_INVALID_BYTES: Final = 1 << 40
_STATIC_FIELDS: Final[list[Field]] = [(b"", b""), *STATIC_TABLE]
_STATIC_SIZES: Final = [_INVALID_BYTES, *[len(name) + len(value) + _FIELD_OVERHEAD for name, value in STATIC_TABLE]]
# A block begins with at most two size updates: the smallest of several, and the last (RFC 7541, 4.2).
_MAX_SIZE_UPDATES: Final = 2

# Strings that were decoded before, for all connections: most peers send the same few. Short ones, and not too many;
# those that the peer marks as secret are never kept.
_KNOWN_STRINGS: Final[dict[bytes, bytes]] = {}
_MAX_KNOWN_STRINGS: Final = 2048
_MAX_KNOWN_BYTES: Final = 256


class HpackError(Exception):
    """The block breaks the rules or goes far beyond the limits: the connection must end (COMPRESSION_ERROR)."""


class HeaderListTooLargeError(Exception):
    """The fields are over the announced limit. The block was decoded to its end: the connection can go on."""


class Decoder:
    """Decodes all header blocks of one connection, in order.

    `generation` grows whenever a block changed the table: anything derived from a block's bytes before is then invalid.
    """

    __slots__ = (
        "_fields",
        "_max_list_bytes",
        "_max_table_bytes",
        "_size_limit",
        "_sizes",
        "_table_bytes",
        "generation",
    )

    def __init__(self, max_list_bytes: int, max_table_bytes: int = 4096) -> None:
        self._max_list_bytes = max_list_bytes
        # The size that we announce, and the size that the peer's encoder chose.
        self._size_limit = max_table_bytes
        self._max_table_bytes = max_table_bytes
        # By index: 0 (never right), the static table, the dynamic table, the newest first; and their sizes.
        self._fields = _STATIC_FIELDS.copy()
        self._sizes = _STATIC_SIZES.copy()
        self._table_bytes = 0
        self.generation = 0

    @property
    def table_bytes(self) -> int:
        """The size of the dynamic table as RFC 7541, 4.1 counts it."""
        return self._table_bytes

    # One function, because calls would be most of its time: it runs for each new header block of each request.
    def decode(self, block: bytes) -> tuple[Field, ...]:  # noqa: C901
        """The fields of a complete header block.

        Raises HeaderListTooLargeError for a list over the limit, and HpackError for a block that cannot be decoded or
        is more than four times over it.
        """
        fields, sizes = self._fields, self._sizes
        found: list[Field] = []
        limit = self._max_list_bytes
        total = 0
        at = self._read_size_updates(block) if block and 0x20 <= block[0] < 0x40 else 0
        end = len(block)
        try:
            while at < end:
                byte = block[at]
                at += 1
                if byte >= 0x80:  # both name and value are in a table
                    index = byte & 0x7F
                    if index == 0x7F:
                        index, at = _read_number(block, at, 0x7F)
                    total += sizes[index]
                    if total > limit:
                        limit = self._hard_limit(total)
                    found.append(fields[index])
                    continue
                if byte >= 0x40:  # to be inserted
                    index = byte & 0x3F
                    if index == 0x3F:
                        index, at = _read_number(block, at, 0x3F)
                elif byte >= 0x20:
                    raise HpackError("a table size update is not at the start of its block")
                else:
                    index = byte & 0x0F
                    if index == 0x0F:
                        index, at = _read_number(block, at, 0x0F)
                is_secret = 0x10 <= byte < 0x20
                if index:
                    name = fields[index][0]
                else:
                    name, at = _read_string(block, at, is_secret)
                value, at = _read_string(block, at, is_secret)
                size = len(name) + len(value) + _FIELD_OVERHEAD
                total += size
                if total > limit:
                    limit = self._hard_limit(total)
                field = (name, value)
                found.append(field)
                if byte >= 0x40:
                    self._insert(field, size)
        except IndexError:
            raise HpackError("an index is beyond the table, or the block ends within a field") from None
        if limit != self._max_list_bytes:
            raise HeaderListTooLargeError(
                f"the header list has {total} bytes, at most {self._max_list_bytes} are accepted"
            )
        return tuple(found)

    def _hard_limit(self, total: int) -> int:
        if total >= _INVALID_BYTES:
            raise HpackError("index 0 is used")
        limit = self._max_list_bytes * _HARD_FACTOR
        if total > limit:
            raise HpackError(f"the header list is {_HARD_FACTOR} times over the limit of {self._max_list_bytes} bytes")
        return limit

    def _insert(self, field: Field, size: int) -> None:
        self.generation += 1
        self._evict(self._max_table_bytes - size)
        if size <= self._max_table_bytes:
            self._fields.insert(_FIRST_DYNAMIC, field)
            self._sizes.insert(_FIRST_DYNAMIC, size)
            self._table_bytes += size

    def _evict(self, max_bytes: int) -> None:
        """Drop the oldest until no more than `max_bytes` are left; an entry larger than the table empties it."""
        fields, sizes = self._fields, self._sizes
        while self._table_bytes > max_bytes and len(fields) > _FIRST_DYNAMIC:
            fields.pop()
            self._table_bytes -= sizes.pop()

    def _read_size_updates(self, block: bytes) -> int:
        """Obey the size updates that `block` begins with, and return where they end."""
        at = num_updates = 0
        while at < len(block) and 0x20 <= block[at] < 0x40:
            size = block[at] & 0x1F
            at += 1
            if size == 0x1F:
                try:
                    size, at = _read_number(block, at, 0x1F)
                except IndexError:
                    raise HpackError("the block ends within a table size update") from None
            num_updates += 1
            if num_updates > _MAX_SIZE_UPDATES:
                raise HpackError(f"a block begins with more than {_MAX_SIZE_UPDATES} table size updates")
            if size > self._size_limit:
                raise HpackError(f"the peer wants a table of {size} bytes, at most {self._size_limit} are allowed")
            self._max_table_bytes = size
            self._evict(size)
            self.generation += 1
        return at


def literal(name: bytes, value: bytes) -> bytes:
    """A field for a block of ours: literal without indexing, not Huffman coded; it changes no table."""
    return b"\x00" + _number(len(name)) + name + _number(len(value)) + value


def _number(value: int) -> bytes:
    """A string length (RFC 7541, 5.1, with 7 bits of prefix)."""
    if value < 0x7F:
        return value.to_bytes(1)
    encoded = bytearray(b"\x7f")
    value -= 0x7F
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_number(block: bytes, at: int, value: int) -> tuple[int, int]:
    """The number whose prefix was full with `value`, and where it ends; IndexError when the block ends before."""
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > _MAX_NUMBER_SHIFT:
            raise HpackError("a number is too long")


def _read_string(block: bytes, at: int, is_secret: bool) -> tuple[bytes, int]:
    """The string at `at`, and where it ends; IndexError when the block ends before its length does."""
    first = block[at]
    at += 1
    length = first & 0x7F
    if length == 0x7F:
        length, at = _read_number(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackError("a string is longer than its block")
    data = block[at:end]
    if first < 0x80:
        return data, end
    known = _KNOWN_STRINGS.get(data)
    return (known if known is not None else _decode_huffman(data, is_secret)), end


def _decode_huffman(data: bytes, is_secret: bool) -> bytes:
    try:
        text = hpack_tables.decode(data)
    except hpack_tables.HuffmanError as error:
        raise HpackError(f"a string is not in the Huffman code: {error}") from None
    if len(data) <= _MAX_KNOWN_BYTES and not is_secret:
        if len(_KNOWN_STRINGS) >= _MAX_KNOWN_STRINGS:
            _KNOWN_STRINGS.clear()
        _KNOWN_STRINGS[data] = text
    return text

"""The fixed tables of header compression: static fields and Huffman codes (RFC 7541, appendices A and B)."""

from __future__ import annotations

Field = tuple[bytes, bytes]

# The first of them has index 1.
STATIC_TABLE: tuple[Field, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)


# Strings in the Huffman code of header compression (RFC 7541, 5.2 and Appendix B), decoded a byte at a time.

# Bits of the code of each byte, and last of the end-of-string symbol. The code is canonical: codes of one length
# follow one another in the order of their symbols, so that the lengths say all.
# fmt: off
CODE_LENGTHS: tuple[int, ...] = (
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
)
# fmt: on
_END_OF_STRING = 256
# A string ends in less than a byte of padding.
_MAX_PADDING_BITS = 7


class HuffmanError(Exception):
    """The bytes are not a valid string in this code."""


def codes() -> list[int]:
    """The code of each symbol, as a number of `CODE_LENGTHS[symbol]` bits."""
    found = [0] * len(CODE_LENGTHS)
    code = length = 0
    for symbol in sorted(range(len(CODE_LENGTHS)), key=lambda symbol: (CODE_LENGTHS[symbol], symbol)):
        code <<= CODE_LENGTHS[symbol] - length
        length = CODE_LENGTHS[symbol]
        found[symbol] = code
        code += 1
    return found


class _State(dict[int, tuple[bytes, "_State"]]):
    """A byte boundary in the middle of a code: the symbols that each next byte completes, and the state after it.

    Entries are made when first looked up: ordinary strings need a few hundred of the 256 x 256.
    """

    __slots__ = ("can_end", "node")

    def __init__(self, node: int, *, can_end: bool) -> None:
        super().__init__()
        self.node = node
        self.can_end = can_end

    def __missing__(self, byte: int) -> tuple[bytes, _State]:
        completed, node = _walk(self.node, byte)
        entry = self[byte] = (completed, _STATES[node])
        return entry


def _tree() -> list[list[int]]:
    """The code as a binary tree: for each inner node its two children, leaves as `-1 - symbol`."""
    nodes = [[0, 0]]
    for symbol, code in enumerate(codes()):
        node = 0
        for position in range(CODE_LENGTHS[symbol] - 1, 0, -1):
            bit = code >> position & 1
            if not nodes[node][bit]:
                nodes.append([0, 0])
                nodes[node][bit] = len(nodes) - 1
            node = nodes[node][bit]
        nodes[node][code & 1] = -1 - symbol
    return nodes


def _walk(node: int, byte: int) -> tuple[bytes, int]:
    """The symbols that the 8 bits of `byte` complete from `node` on, and the node they end in."""
    completed = bytearray()
    for position in range(7, -1, -1):
        node = _TREE[node][byte >> position & 1]
        if node < 0:
            if node == -1 - _END_OF_STRING:
                raise HuffmanError("the end-of-string symbol is within a string")
            completed.append(-1 - node)
            node = 0
    return bytes(completed), node


def _padding_nodes() -> set[int]:
    """Where a string may end: padding is the beginning of the end-of-string symbol, which is all ones."""
    node, nodes = 0, {0}
    for _ in range(_MAX_PADDING_BITS):
        node = _TREE[node][1]
        nodes.add(node)
    return nodes


_TREE = _tree()
_PADDING = _padding_nodes()
_STATES = [_State(node, can_end=node in _PADDING) for node in range(len(_TREE))]
_START = _STATES[0]


def decode(data: bytes) -> bytes:
    """The string; raises HuffmanError for the end-of-string symbol and for wrong padding."""
    state = _START
    pieces = []
    for byte in data:
        piece, state = state[byte]
        pieces.append(piece)
    if not state.can_end:
        raise HuffmanError("the padding is more than 7 bits or not all ones")
    return b"".join(pieces)

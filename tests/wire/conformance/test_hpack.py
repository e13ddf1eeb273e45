"""RFC 7541 as a server shows it: representations, tables, Huffman code, and what it sends to small tables."""

from __future__ import annotations

import json

import hpack
import pytest
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from support.http2_frames import ErrorCode, Setting, block, headers, settings
from support.http2_script import Step, answers, case, closes, play
from support.raw_http2 import Peer, get_fields
from support.wires import RunningWire

# Pseudo-fields only: what follows them is what a test is about.
HEAD = block(get_fields("/head"))
BROKEN = closes(ErrorCode.COMPRESSION_ERROR)


def huffman(text: bytes) -> bytes:
    """`text` in RFC 7541's code (appendix B), padded with ones."""
    bits = "".join(format(REQUEST_CODES[byte], f"0{REQUEST_CODES_LENGTH[byte]}b") for byte in text)
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""


def string(text: bytes, *, is_huffman: bool = False) -> bytes:
    coded = huffman(text) if is_huffman else text
    assert len(coded) < 127, "one byte of length is enough"
    return bytes((len(coded) | (0x80 if is_huffman else 0),)) + coded


# The beginning of each kind of literal: with a new name, and with the name of static entry 58, user-agent.
LITERALS = {
    "6.2.1-indexed": (b"\x40", b"\x7a"),
    "6.2.2-not-indexed": (b"\x00", b"\x0f\x2b"),
    "6.2.3-never-indexed": (b"\x10", b"\x1f\x2b"),
}


@pytest.mark.parametrize("is_huffman", [False, True], ids=["plain", "huffman"])
@pytest.mark.parametrize("kind", LITERALS)
def test_6_2_literals(peer: Peer, kind: str, is_huffman: bool) -> None:
    new, named = LITERALS[kind]
    fields = new + string(b"x-name", is_huffman=is_huffman) + string(b"a value", is_huffman=is_huffman)
    fields += named + string(b"agent/1.0", is_huffman=is_huffman)
    peer.send(headers(1, HEAD + fields))
    found = json.loads(bytes(peer.expect_answer(1).body))["headers"]
    assert found == {"host": "test", "x-name": "a value", "user-agent": "agent/1.0"}


@pytest.mark.parametrize(
    "steps",
    [
        # :method GET, :scheme http, :path /, and accept-encoding: gzip, deflate
        case("6.1-static", headers(1, b"\x82\x86\x84\x41\x04test\x90"), answers(1, 200, b"hello")),
        case("6.1-post", headers(1, b"\x83\x86\x44\x05/echo"), answers(1, 200)),
        case("6.1-index-0", headers(1, HEAD + b"\x80"), BROKEN),
        case("2.3.3-index-past-the-tables", headers(1, HEAD + b"\xbe"), BROKEN),
        case("2.3.3-name-past-the-tables", headers(1, HEAD + b"\x7e\x01a"), BROKEN),
        case("2.3.3-not-indexed-name-past-the-tables", headers(1, HEAD + b"\x0f\x2f\x01a"), BROKEN),
        case("2.3.3-last-static", headers(1, HEAD + b"\xbd"), answers(1, 200)),
        case(
            "2.3.3-first-dynamic",
            headers(1, HEAD + b"\x40\x01a\x01b"),
            answers(1, 200),
            headers(3, HEAD + b"\xbe"),
            answers(3, 200),
            headers(5, HEAD + b"\xbf"),
            BROKEN,
        ),
        case("4.2-update-at-the-end", headers(1, HEAD + b"\x20"), BROKEN),
        case("4.2-update-between-fields", headers(1, b"\x82\x3f\xe1\x1f\x86\x84"), BROKEN),
        case("6.3-update-to-0", headers(1, b"\x20" + HEAD), answers(1, 200)),
        case("6.3-update-to-the-limit", headers(1, b"\x3f\xe1\x1f" + HEAD), answers(1, 200)),
        case("6.3-update-twice", headers(1, b"\x20\x3f\xe1\x1f" + HEAD), answers(1, 200)),
        case("6.3-update-beyond-the-limit", headers(1, b"\x3f\xe2\x1f" + HEAD), BROKEN),
        case("6.3-update-far-beyond-the-limit", headers(1, b"\x3f\xe1\xff\xff\x07" + HEAD), BROKEN),
        case("5.1-integer-without-end", headers(1, HEAD + b"\xff" + b"\x80" * 20 + b"\x01"), BROKEN),
        case("5.1-integer-cut-off", headers(1, HEAD + b"\xff\x80"), BROKEN),
        case("5.1-integer-of-64-bits", headers(1, HEAD + b"\x00\x7f\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), BROKEN),
        case("5.2-name-longer-than-the-block", headers(1, HEAD + b"\x00\x05ab"), BROKEN),
        case("5.2-value-missing", headers(1, HEAD + b"\x00\x01a"), BROKEN),
        case("5.2-padding-of-eight-bits", headers(1, HEAD + b"\x00\x01a" + b"\x82" + huffman(b"b&") + b"\xff"), BROKEN),
        case(
            "5.2-huffman-padded-by-a-byte", headers(1, HEAD + b"\x00\x01a\x83" + huffman(b"aaa")[:2] + b"\xff"), BROKEN
        ),
        case("5.2-padded-by-zeros", headers(1, HEAD + b"\x00\x01a\x81\x18"), BROKEN),
        case("5.2-end-of-string-symbol", headers(1, HEAD + b"\x00\x01a\x84\xff\xff\xff\xff"), BROKEN),
        case("5.2-end-of-string-symbol-inside", headers(1, HEAD + b"\x00\x01a\x86\x1f\xff\xff\xff\xe3\xff"), BROKEN),
        case("5.2-empty-value", headers(1, HEAD + b"\x00\x01a\x00"), answers(1, 200)),
        case("5.2-empty-huffman-value", headers(1, HEAD + b"\x00\x01a\x80"), answers(1, 200)),
    ],
)
def test_7541(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_6_2_every_byte_survives_the_huffman_code(peer: Peer) -> None:
    """All that a value may hold, in strings of a few bytes."""
    allowed = [byte for byte in range(0x21, 0x100) if byte != 0x7F]
    for stream_id, at in enumerate(range(0, len(allowed), 16)):
        value = bytes(allowed[at : at + 16])
        peer.send(headers(2 * stream_id + 1, HEAD + b"\x00\x01a" + string(value, is_huffman=True)))
        found = json.loads(bytes(peer.expect_answer(2 * stream_id + 1).body))["headers"]["a"]
        assert found == value.decode("latin-1")


def test_2_3_2_the_dynamic_table_over_many_requests(peer: Peer) -> None:
    """An encoder that indexes all it can, beyond what its table holds: entries move and are evicted."""
    encoder = hpack.Encoder()
    for number in range(60):
        fields = [*get_fields("/head"), *((f"x-{number % 7}-{index}", f"{number}-{'v' * 90}") for index in range(3))]
        peer.send(headers(2 * number + 1, encoder.encode(fields)))
        found = json.loads(bytes(peer.expect_answer(2 * number + 1).body))["headers"]
        assert {name: value for name, value in found.items() if name != "host"} == dict(fields[4:])


def test_4_4_an_entry_larger_than_the_table_empties_it(peer: Peer) -> None:
    peer.send(headers(1, HEAD + b"\x40\x01a\x01b"))
    peer.expect_answer(1)
    peer.send(headers(3, HEAD + b"\x40\x01c\x7f\x81\x1f" + b"v" * 4096))
    peer.expect_answer(3)
    peer.send(headers(5, HEAD + b"\xbe"))
    peer.expect_goaway(ErrorCode.COMPRESSION_ERROR)


def test_4_3_a_smaller_table_evicts(peer: Peer) -> None:
    peer.send(headers(1, HEAD + b"\x40\x01a\x01b\x40\x01c\x01d"))
    peer.expect_answer(1)
    # Room for one entry of 34 bytes.
    peer.send(headers(3, b"\x3f\x03" + HEAD + b"\xbe"))
    assert json.loads(bytes(peer.expect_answer(3).body))["headers"]["c"] == "d"
    peer.send(headers(5, HEAD + b"\xbf"))
    peer.expect_goaway(ErrorCode.COMPRESSION_ERROR)


def test_equal_blocks_mean_what_the_table_makes_of_them(peer: Peer) -> None:
    """The same bytes are another request once the table has changed: no memory of blocks may outlive that."""
    same = HEAD + b"\xbe"
    found = []
    for number in range(4):
        insert, *repeats = range(8 * number + 1, 8 * number + 9, 2)
        peer.send(headers(insert, HEAD + b"\x40\x01a" + string(b"%d" % number)))
        peer.expect_answer(insert)
        for stream_id in repeats:
            peer.send(headers(stream_id, same))
            found.append(json.loads(bytes(peer.expect_answer(stream_id).body))["headers"]["a"])
    assert found == [str(number) for number in range(4) for _ in range(3)]


@pytest.mark.parametrize("size", [0, 100, 4095, 4096, 65536])
def test_6_3_the_server_keeps_to_the_peers_table(wire: RunningWire, size: int) -> None:
    """A decoder with that table understands every answer; one below the default wants an update first."""
    with Peer(wire.address, announces={Setting.HEADER_TABLE_SIZE: size}) as peer:
        peer.decode_with_table_of(size)
        for stream_id in (1, 3, 5):
            peer.get(stream_id)
            assert peer.expect_answer(stream_id).body == b"hello"
        peer.call(7, "Echo", b"a")
        assert peer.expect_answer(7).messages == [b"a"]


def test_6_3_the_peers_table_changes_on_the_way(peer: Peer) -> None:
    for stream_id, size in ((1, 4096), (3, 0), (5, 4096), (7, 64)):
        peer.send(settings({Setting.HEADER_TABLE_SIZE: size}))
        peer.expect_alive()
        peer.decode_with_table_of(size)
        peer.call(stream_id, "Fail", b"5 a text")
        assert peer.expect_answer(stream_id).grpc_message == "a text"

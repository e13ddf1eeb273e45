"""Feed damaged header blocks to our decoder and to libnghttp2's, and compare what they say.

    PYTHONPATH=tests:. python -m fuzz.hpack_against_nghttp2 --blocks 1000000 --seed 1

Exits with 1 at the first difference, and prints the blocks that lead to it. Two differences are intended, and
counted: we refuse more than two table size updates, and numbers of more than four bytes after their first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import hpack
from fuzz.nghttp2_inflater import Nghttp2Inflater

from modelserver.wire.http2.hpack import Decoder, HpackError
from modelserver.wire.http2.hpack_tables import STATIC_TABLE, Field

_STRICTER = ("a number is too long", "table size updates")
# Encodings that are at the border of something.
_SNIPPETS = [
    *(b"\x20", b"\x3f\x00", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f"),  # table size updates
    *(b"\x80", b"\xbe", b"\xbf", b"\xff\x00", b"\xff\x01", b"\xff\x40", b"\xff\x80\x80\x80\x80\x00"),  # indices
    *(b"\x7f\x00", b"\x0f\x00", b"\x1f\x00", b"\x7e\x00", b"\x7e\x01a", b"\x0f\x2f\x01a"),  # indexed names
    *(b"\x40", b"\x40\x00\x00", b"\x00\x00", b"\x00\x00\x00", b"\x00\x00\x7f\x00", b"\x00\x7f\x80\x01"),  # lengths
    *(b"\x00\x01a\x7f\x80\x80\x80\x80\x00", b"\x00\x00\x85\xff\xff\xff\xff\x3f"),
    *(b"\x00\x00\x81\x00", b"\x00\x00\x81\x1f", b"\x00\x00\x81\xff"),  # Huffman
]
_NAMES = [b"a", b"grpc-timeout", b"user-agent", b"x-request-id", b"te", b"", b"key-bin", b"Upper", b"n" * 130]
_VALUES = [b"", b"1", b"trailers", b"v" * 127, b"v" * 700, b"\xff\x00\x80", b"5S", b"/v2/models/m/infer"]


def session(random_source: random.Random) -> list[bytes]:
    """The header blocks of one connection, as an encoder makes them."""
    encoder = hpack.Encoder()
    blocks = []
    for _ in range(random_source.randint(1, 8)):
        if random_source.random() < 0.15:
            encoder.header_table_size = random_source.choice([0, 40, 100, 300, 4096, random_source.randrange(4097)])
        fields = [random_field(random_source) for _ in range(random_source.randint(0, 8))]
        blocks.append(encoder.encode(fields, huffman=random_source.random() < 0.6))
    return blocks


def random_field(random_source: random.Random) -> tuple[bytes, bytes, bool]:
    is_secret = random_source.random() < 0.1
    if random_source.random() < 0.4:
        return (*random_source.choice(STATIC_TABLE), is_secret)
    value = random_source.choice(_VALUES) if random_source.random() < 0.6 else random_source.randbytes(9)
    return random_source.choice(_NAMES), value, is_secret


def _flip_bit(block: bytearray, random_source: random.Random) -> None:
    if block:
        block[random_source.randrange(len(block))] ^= 1 << random_source.randrange(8)


def _set_byte(block: bytearray, random_source: random.Random) -> None:
    if block:
        block[random_source.randrange(len(block))] = random_source.choice([0, 0x7F, 0x80, 0xFF, 0x3F, 0x1F, 0x0F, 0x40])


def _insert_snippet(block: bytearray, random_source: random.Random) -> None:
    at = random_source.randint(0, len(block)) if random_source.random() < 0.7 else 0
    block[at:at] = random_source.choice(_SNIPPETS)


def _delete(block: bytearray, random_source: random.Random) -> None:
    at = random_source.randint(0, len(block))
    del block[at : at + random_source.randint(1, 4)]


def _cut(block: bytearray, random_source: random.Random) -> None:
    del block[random_source.randint(0, len(block)) :]


def _repeat(block: bytearray, random_source: random.Random) -> None:
    at = random_source.randint(0, len(block))
    block[at:at] = block[at : at + random_source.randint(1, 20)]


def _append_noise(block: bytearray, random_source: random.Random) -> None:
    block += random_source.randbytes(random_source.randint(1, 12))


_DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    _flip_bit,
    _flip_bit,
    _set_byte,
    _insert_snippet,
    _insert_snippet,
    _delete,
    _cut,
    _repeat,
    _append_noise,
]


def damage(block: bytes, random_source: random.Random) -> bytes:
    """`block` with one to three things wrong, or at least unusual."""
    damaged = bytearray(block)
    for _ in range(random_source.choice([1, 1, 1, 2, 3])):
        random_source.choice(_DAMAGES)(damaged, random_source)
    return bytes(damaged)


def compare(blocks: list[bytes], counts: Counter[str]) -> str | None:
    """Feed `blocks` to both decoders until one refuses; what they differ in, or None."""
    ours, theirs = Decoder(1 << 24), Nghttp2Inflater()
    for number, block in enumerate(blocks):
        found: tuple[Field, ...] | None
        try:
            found, reason = ours.decode(block), ""
        except HpackError as error:
            found, reason = None, str(error)
        expected = theirs.decode(block)
        counts["blocks"] += 1
        if found != expected:
            if found is None and any(part in reason for part in _STRICTER):
                counts["stricter by intent"] += 1
                return None
            return f"block {number}: ours {found} {reason}, nghttp2 {expected}"
        if found is None:
            counts["refused"] += 1
            return None
        counts["accepted"] += 1
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="stop after this many damaged blocks")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random_source = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    started = time.monotonic()
    while counts["damaged"] < arguments.blocks:
        whole = session(random_source)
        for _ in range(30):  # making a session costs more than damaging it
            at = random_source.randrange(len(whole))
            blocks = [*whole[:at], damage(whole[at], random_source), *whole[at + 1 :]]
            counts["damaged"] += 1
            if difference := compare(blocks, counts):
                print(difference, *[block.hex() for block in blocks], sep="\n")
                return 1
    print(f"{dict(counts)}, no difference, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""RFC 7541: examples of Appendix C, errors, and the bounds on what a block may cost."""

from __future__ import annotations

import pytest
from hpack import Encoder
from hpack.table import HeaderTable

from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError, literal
from modelserver.wire.http2.hpack_tables import STATIC_TABLE, Field

LIMIT = 16384


def hexes(text: str) -> bytes:
    return bytes.fromhex(text)


FIRST_REQUEST = (
    (b":method", b"GET"),
    (b":scheme", b"http"),
    (b":path", b"/"),
    (b":authority", b"www.example.com"),
)
SECOND_REQUEST = (*FIRST_REQUEST, (b"cache-control", b"no-cache"))
THIRD_REQUEST = (
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":path", b"/index.html"),
    (b":authority", b"www.example.com"),
    (b"custom-key", b"custom-value"),
)
DATE_1, DATE_2 = b"Mon, 21 Oct 2013 20:13:21 GMT", b"Mon, 21 Oct 2013 20:13:22 GMT"
LOCATION = (b"location", b"https://www.example.com")
FIRST_RESPONSE = ((b":status", b"302"), (b"cache-control", b"private"), (b"date", DATE_1), LOCATION)
SECOND_RESPONSE = ((b":status", b"307"), (b"cache-control", b"private"), (b"date", DATE_1), LOCATION)
THIRD_RESPONSE = (
    (b":status", b"200"),
    (b"cache-control", b"private"),
    (b"date", DATE_2),
    LOCATION,
    (b"content-encoding", b"gzip"),
    (b"set-cookie", b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"),
)


def test_the_static_table_is_that_of_the_hpack_package() -> None:
    assert tuple((bytes(name), bytes(value)) for name, value in HeaderTable.STATIC_TABLE) == STATIC_TABLE


@pytest.mark.parametrize(
    ("block", "field", "table_bytes"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", (b"custom-key", b"custom-header"), 55),
        ("040c2f73616d706c652f70617468", (b":path", b"/sample/path"), 0),
        ("100870617373776f726406736563726574", (b"password", b"secret"), 0),
        ("82", (b":method", b"GET"), 0),
    ],
)
def test_each_kind_of_field_of_appendix_c_2(block: str, field: Field, table_bytes: int) -> None:
    decoder = Decoder(LIMIT)
    assert decoder.decode(hexes(block)) == (field,)
    assert decoder.table_bytes == table_bytes


@pytest.mark.parametrize(
    ("blocks", "table_size", "lists", "table_bytes"),
    [
        pytest.param(
            [
                "828684410f7777772e6578616d706c652e636f6d",
                "828684be58086e6f2d6361636865",
                "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
            ],
            4096,
            [FIRST_REQUEST, SECOND_REQUEST, THIRD_REQUEST],
            [57, 110, 164],
            id="C.3",
        ),
        pytest.param(
            [
                "828684418cf1e3c2e5f23a6ba0ab90f4ff",
                "828684be5886a8eb10649cbf",
                "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
            ],
            4096,
            [FIRST_REQUEST, SECOND_REQUEST, THIRD_REQUEST],
            [57, 110, 164],
            id="C.4",
        ),
        pytest.param(
            [
                "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54"
                "6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
                "4803333037c1c0bf",
                "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d"
                "4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273"
                "696f6e3d31",
            ],
            256,
            [FIRST_RESPONSE, SECOND_RESPONSE, THIRD_RESPONSE],
            [222, 222, 215],
            id="C.5",
        ),
        pytest.param(
            [
                "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff"
                "6e919d29ad171863c78f0b97c8e9ae82ae43d3",
                "4883640effc1c0bf",
                "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab"
                "77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
            ],
            256,
            [FIRST_RESPONSE, SECOND_RESPONSE, THIRD_RESPONSE],
            [222, 222, 215],
            id="C.6",
        ),
    ],
)
def test_sequences_of_appendix_c(
    blocks: list[str], table_size: int, lists: list[tuple[Field, ...]], table_bytes: list[int]
) -> None:
    decoder = Decoder(LIMIT, max_table_bytes=table_size)
    for block, fields, num_bytes in zip(blocks, lists, table_bytes, strict=True):
        assert decoder.decode(hexes(block)) == fields
        assert decoder.table_bytes == num_bytes


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("80", "index 0"),
        ("8280", "index 0"),
        ("be", "beyond the table"),
        ("ff8080808001", "too long"),
        ("ffffffffff7f", "too long"),
        ("ffffffff7f", "beyond the table"),
        ("7e0161", "beyond the table"),
        ("ff", "ends within"),
        ("40", "ends within"),
        ("400161", "ends within"),
        ("40036162", "longer than its block"),
        ("40016105616263", "longer than its block"),
        ("007f", "ends within"),
        ("007fffffff7f61", "longer than its block"),
        ("8220", "not at the start"),
        ("3fe21f", "4097"),
        ("3f", "ends within"),
        ("3fe1", "ends within"),
        ("202020", "more than 2"),
        ("000161" + "84ffffffff", "end-of-string"),
        ("000161" + "81fe", "padding"),
        ("000161" + "821fff", "padding"),
        ("000161" + "8118", "padding"),
    ],
)
def test_a_broken_block_is_an_error(block: str, message: str) -> None:
    with pytest.raises(HpackError, match=message):
        Decoder(LIMIT).decode(hexes(block))


def test_an_empty_block_has_no_fields() -> None:
    assert Decoder(LIMIT).decode(b"") == ()


def test_an_empty_huffman_string_is_right() -> None:
    assert Decoder(LIMIT).decode(hexes("00016180")) == ((b"a", b""),)


@pytest.mark.parametrize("updates", ["20", "203fe11f", "3fe11f", "3f00"])
def test_a_block_may_begin_with_size_updates(updates: str) -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(hexes("400161016240016301644001650166"))
    generation = decoder.generation
    assert decoder.decode(hexes(updates + "82")) == ((b":method", b"GET"),)
    assert decoder.generation > generation


def test_a_smaller_table_evicts_the_oldest() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(hexes("4001610162" + "4001630164"))
    assert decoder.table_bytes == 68
    decoder.decode(hexes("3f0f"))  # 46 bytes: one entry
    assert decoder.table_bytes == 34
    assert decoder.decode(hexes("be")) == ((b"c", b"d"),)
    with pytest.raises(HpackError, match="beyond the table"):
        decoder.decode(hexes("bf"))


def test_an_entry_larger_than_the_table_empties_it() -> None:
    decoder = Decoder(LIMIT, max_table_bytes=64)
    decoder.decode(hexes("4001610162"))
    large = b"\x40\x01a\x7f\x00" + bytes(127)
    assert decoder.decode(large) == ((b"a", bytes(127)),)
    assert decoder.table_bytes == 0


def test_an_inserted_field_may_take_its_name_from_the_entry_it_evicts() -> None:
    decoder = Decoder(LIMIT, max_table_bytes=40)
    decoder.decode(hexes("4001610162"))
    assert decoder.decode(hexes("7e0163")) == ((b"a", b"c"),)
    assert decoder.decode(hexes("be")) == ((b"a", b"c"),)


def test_the_generation_tells_whether_the_table_changed() -> None:
    decoder = Decoder(LIMIT)
    for block in ("82", "000161016282", "10016101628286", "04012f"):
        decoder.decode(hexes(block))
    assert decoder.generation == 0
    decoder.decode(hexes("4001610162"))
    assert decoder.generation == 1
    decoder.decode(hexes("be82"))
    assert decoder.generation == 1


def test_a_list_over_the_limit_is_decoded_to_its_end() -> None:
    encoder, decoder = Encoder(), Decoder(400)
    large: list[Field] = [(b"a", bytes(400)), (b"b", b"c")]
    with pytest.raises(HeaderListTooLargeError, match="at most 400"):
        decoder.decode(encoder.encode(large, huffman=False))
    assert decoder.decode(encoder.encode([(b"b", b"c"), (b"d", b"e")])) == ((b"b", b"c"), (b"d", b"e"))


def test_a_list_at_the_limit_is_accepted() -> None:
    fields = ((b"a", bytes(100)), (b"b", bytes(200)))
    block = b"".join([literal(name, value) for name, value in fields])
    assert Decoder(302 + 64).decode(block) == fields
    with pytest.raises(HeaderListTooLargeError):
        Decoder(301 + 64).decode(block)


def test_a_list_far_over_the_limit_ends_the_connection() -> None:
    decoder = Decoder(LIMIT)
    with pytest.raises(HpackError, match="4 times"):
        decoder.decode(literal(b"a", bytes(4 * LIMIT)))


def test_a_bomb_of_one_large_entry_is_stopped_after_a_few_references() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(b"\x40" + literal(b"a", bytes(4000))[1:])
    assert decoder.table_bytes > 4000
    with pytest.raises(HpackError, match="4 times"):
        decoder.decode(b"\xbe" * 65536)


def test_thousands_of_tiny_literals_are_stopped_at_the_limit() -> None:
    with pytest.raises(HpackError, match="4 times"):
        Decoder(LIMIT).decode(b"\x00\x00\x00" * 4000)


def test_thousands_of_tiny_insertions_keep_the_table_small() -> None:
    decoder = Decoder(1 << 20)
    decoder.decode(b"\x40\x00\x00" * 4000)
    assert decoder.table_bytes == 4096


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 16383, 16384, 70000])
def test_literals_are_read_back(length: int) -> None:
    value = b"v" * length
    assert Decoder(1 << 20).decode(literal(b"name", value)) == ((b"name", value),)


@pytest.mark.parametrize("secret_first", [True, False])
def test_secret_strings_are_decoded_as_others(secret_first: bool) -> None:
    blocks = [hexes("10016186a8eb10649cbf"), hexes("00016186a8eb10649cbf")]
    decoded = [Decoder(LIMIT).decode(block) for block in (blocks if secret_first else reversed(blocks))]
    assert decoded == [((b"a", b"no-cache"),)] * 2


class CountingBlock(bytes):
    """Counts the bytes that are copied out of it."""

    num_copied = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        if isinstance(place, slice):
            CountingBlock.num_copied += len(found)
        return found


def test_no_byte_of_a_block_is_copied_twice() -> None:
    block = CountingBlock(b"".join([literal(b"%d" % number, b"value") for number in range(1000)]))
    CountingBlock.num_copied = 0
    assert len(Decoder(1 << 20).decode(block)) == 1000
    assert CountingBlock.num_copied < len(block)

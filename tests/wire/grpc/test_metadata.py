"""Custom metadata on the wire and as handlers see it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.wire.http2.head import decode_binary, decode_metadata, encode_metadata


def test_the_protocols_own_fields_are_left_out() -> None:
    fields = [
        (b":path", b"/"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"grpc-timeout", b"1S"),
        (b"grpc-trace-bin", b"*"),
        (b"user-agent", b"me"),
        (b"key", b"value"),
    ]
    assert decode_metadata(fields) == {"user-agent": "me", "key": "value"}


def test_the_last_of_equal_keys_counts() -> None:
    assert decode_metadata([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]) == {"a": "3", "b": "2"}


@pytest.mark.parametrize(
    ("value", "text"), [(b"", ""), (b"plain", "plain"), ("é".encode(), "é"), (b"\xe9", "é"), (b"a,b", "a,b")]
)
def test_text(value: bytes, text: str) -> None:
    assert decode_metadata([(b"key", value)]) == {"key": text}


@pytest.mark.parametrize(
    ("value", "decoded"),
    [
        (b"", [b""]),
        (b"AA==", [b"\0"]),
        (b"AA", [b"\0"]),
        (b"AAE=", [b"\0\1"]),
        (b"AAE", [b"\0\1"]),
        (b"AAEC", [b"\0\1\2"]),
        (b"AA,AAE=, AAEC", [b"\0", b"\0\1", b"\0\1\2"]),
        (b"+/8", [b"\xfb\xff"]),
    ],
)
def test_binary_values(value: bytes, decoded: list[bytes]) -> None:
    assert decode_binary(value) == decoded


@pytest.mark.parametrize("value", [b"A", b"AAAAA", b"*", b"A A", b"AA,*", b"_-8", b"AA=A"])
def test_what_is_not_base64(value: bytes) -> None:
    with pytest.raises(ValueError, match="is not base64"):
        decode_metadata([(b"key-bin", value)])


@given(st.binary(max_size=100))
def test_bytes_are_read_back(value: bytes) -> None:
    ((name, encoded),) = encode_metadata([("key-bin", value)])
    assert not encoded.endswith(b"=")
    assert decode_metadata([(name, encoded)]) == {"key-bin": value}


def test_text_is_sent_as_it_is() -> None:
    assert encode_metadata([("key", "a value"), ("other.key_1", " blanks go ")]) == [
        (b"key", b"a value"),
        (b"other.key_1", b"blanks go"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("", "a", "not a valid metadata key"),
        ("Key", "a", "not a valid metadata key"),
        ("a b", "a", "not a valid metadata key"),
        ("é", "a", "not a valid metadata key"),
        ("grpc-status", "0", "not a valid metadata key"),
        (":path", "/", "not a valid metadata key"),
        ("te", "a", "not a valid metadata key"),
        ("a-bin", "a", "must be bytes"),
        ("a", b"a", "must be a string"),
        ("a", "é", "printable ASCII"),
        ("a", "b\r\nc: d", "printable ASCII"),
    ],
)
def test_what_cannot_be_sent(key: str, value: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_metadata([(key, value)])

"""The header blocks that end a call."""

from __future__ import annotations

from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.wire.http2.grpc_ending import OK_TRAILERS, RESPONSE_HEADERS, percent_encode, trailers, trailers_only


def fields(block: bytes) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(block, raw=True)]


def test_the_constant_blocks() -> None:
    assert fields(RESPONSE_HEADERS) == [(b":status", b"200"), (b"content-type", b"application/grpc")]
    assert fields(OK_TRAILERS) == [(b"grpc-status", b"0")]
    assert trailers(0) == OK_TRAILERS


@pytest.mark.parametrize("status", range(17))
def test_trailers_with_a_text(status: int) -> None:
    assert fields(trailers(status, "why: é")) == [(b"grpc-status", b"%d" % status), (b"grpc-message", b"why: %C3%A9")]


@pytest.mark.parametrize("http_status", [200, 405, 415, 431])
def test_an_answer_without_messages_is_one_block(http_status: int) -> None:
    assert fields(trailers_only(13, "text", http_status)) == [
        (b":status", b"%d" % http_status),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"13"),
        (b"grpc-message", b"text"),
    ]


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("", b""),
        ("plain text, as it is!~", b"plain text, as it is!~"),
        ("100%", b"100%25"),
        ("é\n\x7f\t", b"%C3%A9%0A%7F%09"),
        ("\U0001f600", b"%F0%9F%98%80"),
        ("\ud800", b"?"),
        (" a ", b"%20a%20"),
        (" ", b"%20"),
        ("é ", b"%C3%A9%20"),
    ],
)
def test_percent_encoding(text: str, encoded: bytes) -> None:
    assert percent_encode(text) == encoded


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_every_text_arrives(text: str) -> None:
    encoded = percent_encode(text)
    assert encoded == encoded.strip()
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote(encoded.decode("ascii")) == text

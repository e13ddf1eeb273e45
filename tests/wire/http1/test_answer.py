from __future__ import annotations

import pytest

from modelserver.wire.http1.head import answer_start, field_value


def test_an_answer_starts_with_its_status_and_headers() -> None:
    start = answer_start(404, (("Content-Type", "text/plain"), ("Allow", "GET, POST")))
    assert start == b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nAllow: GET, POST\r\n"


def test_a_status_without_a_name() -> None:
    assert answer_start(299, ()) == b"HTTP/1.1 299 \r\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ('a "b"; c=%d/~', 'a "b"; c=%d/~'),
        ("tab\there", "tab\there"),
        ("a\r\nSet-Cookie: b", "a%0D%0ASet-Cookie: b"),
        ("a\nb\rc\0d\x7f", "a%0Ab%0Dc%00d%7F"),
        ("é😀", "%C3%A9%F0%9F%98%80"),
        ("\ud800", "?"),
    ],
)
def test_what_users_wrote_cannot_end_a_line(text: str, value: str) -> None:
    assert field_value(text) == value
    assert answer_start(200, (("X", text),)) == f"HTTP/1.1 200 OK\r\nX: {value}\r\n".encode()

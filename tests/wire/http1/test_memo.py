"""A head that is recalled is the head that would have been parsed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http1_smuggling import REFUSED, SERVED

from modelserver.wire.http1.head import RefusedError, RequestHead, read_head
from modelserver.wire.http1.memo import HeadMemo
from modelserver.wire.limits import WireLimits

LIMITS = replace(WireLimits(), max_body_bytes=1000)

_LINES = st.sampled_from(
    [
        b"Host: test",
        b"Host: other",
        b"Connection: close",
        b"Connection: Upgrade",
        b"Upgrade: h2c",
        b"Expect: 100-continue",
        b"Transfer-Encoding: chunked",
        b"Inference-Header-Content-Length: 7",
        b"X: Content-Length: 5",
    ]
)
_LENGTHS = st.one_of(
    st.integers(0, 2000).map(lambda number: b"%d" % number),
    st.sampled_from([b"", b"007", b" 7 ", b"+7", b"7 7", b"0x7", b"9" * 15, b"9" * 16, b"9" * 25, b"\xb2"]),
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads of one client, which mostly differ in the length of the body only."""
    first = draw(st.sampled_from([b"POST /a HTTP/1.1", b"POST /a HTTP/1.0", b"GET http://test/b?c HTTP/1.1"]))
    lines = draw(st.lists(_LINES, max_size=3))
    name = draw(st.sampled_from([b"Content-Length:", b"content-length: ", b"Content_Length: "]))
    lines.insert(draw(st.integers(0, len(lines))), name + draw(_LENGTHS))
    return b"\r\n".join([first, b"Host: test", *lines, b"", b""])


def _facts(head: RequestHead) -> dict[str, Any]:
    facts = {name: getattr(head, name) for name in RequestHead.__slots__ if name != "http"}
    http = head.http
    return facts | {"http": (http.method, http.path, http.query, dict(http.headers), http.memo)}


def _judged(read: Any) -> Any:
    try:
        return _facts(read())
    except RefusedError as error:
        return error.status, error.message, error.violation


@given(st.lists(heads(), min_size=1, max_size=20))
def test_a_memo_gives_what_the_parser_gives(sent: list[bytes]) -> None:
    memo = HeadMemo(LIMITS)
    for data in [*sent, *sent]:
        assert _judged(lambda data=data: memo.get(data)) == _judged(lambda data=data: read_head(data, LIMITS))


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
@pytest.mark.parametrize("before", [b"1", b"0"])
def test_what_came_before_changes_nothing(name: str, before: bytes) -> None:
    data = (REFUSED | SERVED)[name][0]  # type: ignore[operator]
    head = data[: data.find(b"\r\n\r\n", 2) + 4]
    memo = HeadMemo(LIMITS)
    memo.get(b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: %s\r\n\r\n" % before)
    assert _judged(lambda: memo.get(head)) == _judged(lambda: read_head(head, LIMITS))


def test_equal_heads_share_one_record() -> None:
    memo, data = HeadMemo(LIMITS), b"GET /a HTTP/1.1\r\nHost: test\r\n\r\n"
    assert memo.get(data) is memo.get(bytes(bytearray(data)))


def test_another_length_is_another_record() -> None:
    memo, data = HeadMemo(LIMITS), b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n"
    first = memo.get(data % 5)
    first.http.memo = "the frontend's"
    second = memo.get(data % 1001)
    assert (first.content_length, second.content_length) == (5, 1001)
    assert (first.has_plain_body, second.has_plain_body) == (True, False)
    assert (first.http.headers["content-length"], second.http.headers["content-length"]) == ("5", "1001")
    assert second.http.memo is None


def test_a_memo_does_not_grow() -> None:
    memo = HeadMemo(LIMITS)
    for number in range(1000):
        memo.get(b"GET /%d HTTP/1.1\r\nHost: test\r\n\r\n" % number)
        assert len(memo._heads.known) <= 8
    memo.get(b"GET / HTTP/1.1\r\nHost: test\r\nX: %s\r\n\r\n" % bytes(b"x" * 3000))
    assert all(len(data) <= 2048 for data in memo._heads.known)


def test_nothing_is_shared_when_requests_are_not_recognized() -> None:
    memo, data = HeadMemo(replace(LIMITS, recognizes=False)), b"GET /a HTTP/1.1\r\nHost: test\r\n\r\n"
    first = memo.get(data)
    assert memo.get(data) is not first
    assert _facts(memo.get(data)) == _facts(first)

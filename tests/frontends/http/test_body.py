from __future__ import annotations

import gzip

import pytest
from support.http_calls import Exchange, HttpAnswer

from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError
from modelserver.frontends.http.body import check_size, respond_compressed, with_plain_body
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse

LIMITS = HttpLimits(max_body_bytes=100_000)
NOISE = bytes((value * value * 31 + value) % 251 for value in range(90_000))


async def _plain(body: bytes, encoding: str) -> bytes | HttpAnswer:
    """What arrives, or the answer when it does not."""
    exchange = Exchange("POST", "/", {"content-encoding": encoding}, body)
    arrived: list[Buffer] = []

    def take(plain: Buffer) -> None:
        arrived.append(plain)
        exchange.respond(HttpResponse())

    with_plain_body(exchange, LIMITS, take)
    answer = await exchange.answer()
    return bytes(arrived[0]) if arrived else answer


@pytest.mark.parametrize("plain", [b"", b"short", NOISE], ids=["empty", "inline", "thread"])
async def test_bodies_are_decompressed_inline_or_in_a_thread(plain: bytes) -> None:
    assert await _plain(gzip.compress(plain), "gzip") == plain


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"x", "br", 501),
        (NOISE, "br", 501),
        (b"x", "gzip", 400),
        (NOISE, "gzip", 400),
        (gzip.compress(bytes(100_001)), "gzip", 413),
        (gzip.compress(NOISE + NOISE), "gzip", 413),
    ],
)
async def test_failures_are_answered(body: bytes, encoding: str, status: int) -> None:
    answer = await _plain(body, encoding)
    assert isinstance(answer, HttpAnswer)
    assert answer.status == status
    assert answer.error
    assert answer.headers.get("accept-encoding") == ("gzip, deflate" if status == 501 else None)


def test_what_the_receiver_raises_is_answered() -> None:
    exchange = Exchange("POST", "/", {"content-encoding": "identity"}, b"x")

    def refuse(body: Buffer) -> None:
        raise InvalidArgumentError("no")

    with_plain_body(exchange, LIMITS, refuse)
    assert exchange.answer_now().error == "no"


def test_the_limit_is_inclusive() -> None:
    check_size(bytes(100_000), LIMITS)
    with pytest.raises(PayloadTooLargeError, match=r"100001 bytes.*100000.*--http-max-input-size"):
        check_size(bytes(100_001), LIMITS)


async def _respond(accept: str, *body: bytes) -> HttpAnswer:
    exchange = Exchange("POST", "/", {"accept-encoding": accept})
    respond_compressed(exchange, HttpResponse(200, [("X", "y")], body), choose_encoding(accept))
    return await exchange.answer()


@pytest.mark.parametrize("body", [b"z" * 1000, NOISE], ids=["inline", "thread"])
async def test_answers_are_compressed_when_asked(body: bytes) -> None:
    answer = await _respond("gzip", b"head", body)
    assert answer.headers == {"x": "y", "content-encoding": "gzip"}
    assert gzip.decompress(answer.body) == b"head" + body


@pytest.mark.parametrize(("accept", "body"), [("identity", b"z" * 1000), ("gzip", b"tiny"), ("br", b"z" * 1000)])
async def test_other_answers_stay_as_they_are(accept: str, body: bytes) -> None:
    answer = await _respond(accept, body)
    assert answer.headers == {"x": "y"}
    assert answer.body == body

"""RFC 9113, section 8: requests and answers; and what the wire makes of them for the handlers (HTTP over HTTP/2)."""

from __future__ import annotations

import json

import pytest
from support.http2_frames import ErrorCode, Fields, block, continuation, data, headers
from support.http2_script import Step, answers, case, errs, play, resets, says
from support.raw_http2 import Peer, call_fields, get_fields, prefixed

GET = block(get_fields())
POST = block(get_fields("/echo", method="POST"))
ECHO = block(call_fields("Echo"))
MALFORMED = ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "steps",
    [
        case("8.1-get", headers(1, GET), answers(1, 200, b"hello")),
        case("8.1-post", headers(1, POST, end=False), data(1, b"body", end=True), answers(1, 200, b"body")),
        case(
            "8.1-post-in-pieces",
            headers(1, POST, end=False),
            data(1, b"bo"),
            data(1),
            data(1, b"dy"),
            data(1, end=True),
            answers(1, 200, b"body"),
        ),
        case("8.1-post-without-a-body", headers(1, POST), answers(1, 200, b"")),
        case("8.1-head", headers(1, get_fields(method="HEAD")), answers(1, 200, b"")),
        case("8.1-not-found", headers(1, get_fields("/nowhere")), answers(1, 404)),
        case(
            "8.1-trailers",
            headers(1, POST, end=False),
            data(1, b"body"),
            headers(1, [("x-checksum", "1")]),
            answers(1, 200, b"body"),
        ),
        case(
            "8.1-trailers-without-a-body",
            headers(1, POST, end=False),
            headers(1, [("x-checksum", "1")]),
            answers(1, 200, b""),
        ),
        case(
            "8.1-trailers-of-a-call",
            headers(1, ECHO, end=False),
            data(1, prefixed(b"a")),
            headers(1, [("x-checksum", "1")]),
            says(1, 0, [b"a"]),
        ),
        case(
            "8.1-trailers-that-do-not-end",
            headers(1, POST, end=False),
            data(1, b"body"),
            headers(1, [("x-checksum", "1")], end=False),
            errs(1, MALFORMED),
        ),
        case(
            "8.1-second-head",
            headers(1, POST, end=False),
            headers(1, POST, end=False),
            errs(1, MALFORMED),
        ),
        case(
            "8.1-data-after-trailers",
            headers(1, block(call_fields("Hold")), end=False),
            data(1, prefixed(b"x")),
            headers(1, [("x-checksum", "1")]),
            data(1, b"more"),
            errs(1, ErrorCode.STREAM_CLOSED),
        ),
    ],
)
def test_8_1_messages(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def with_field(name: str, value: str = "value") -> Fields:
    return [*get_fields(), (name, value)]


def without(name: str) -> Fields:
    return [field for field in get_fields() if field[0] != name]


def instead(name: str, value: str) -> Fields:
    return [(key, value if key == name else old) for key, old in get_fields()]


MALFORMED_HEADS = {
    "8.2.1-upper-case": with_field("X-Upper"),
    "8.2.1-one-upper-case-letter": with_field("x-uppeR"),
    "8.2.1-empty-name": with_field(""),
    "8.2.1-space-in-a-name": with_field("x name"),
    "8.2.1-colon-in-a-name": with_field("x:name"),
    "8.2.1-control-character-in-a-name": with_field("x-\x01"),
    "8.2.1-delete-in-a-name": with_field("x-\x7f"),
    "8.2.1-beyond-ascii-in-a-name": with_field("x-\xe9"),
    "8.2.1-line-feed-in-a-value": with_field("x-name", "a\nb"),
    "8.2.1-carriage-return-in-a-value": with_field("x-name", "a\rb"),
    "8.2.1-nul-in-a-value": with_field("x-name", "a\0b"),
    "8.2.1-value-begins-with-a-space": with_field("x-name", " a"),
    "8.2.1-value-ends-with-a-space": with_field("x-name", "a "),
    "8.2.1-value-begins-with-a-tab": with_field("x-name", "\ta"),
    "8.2.1-value-ends-with-a-tab": with_field("x-name", "a\t"),
    "8.2.2-connection": with_field("connection", "keep-alive"),
    "8.2.2-keep-alive": with_field("keep-alive", "1"),
    "8.2.2-proxy-connection": with_field("proxy-connection", "close"),
    "8.2.2-transfer-encoding": with_field("transfer-encoding", "chunked"),
    "8.2.2-upgrade": with_field("upgrade", "h2c"),
    "8.2.2-te-gzip": with_field("te", "gzip"),
    "8.2.2-te-trailers-and-more": with_field("te", "trailers, deflate;q=0.5"),
    "8.3-unknown": [(":test", "ok"), *get_fields()],
    "8.3-of-responses": [*get_fields(), (":status", "200")],
    "8.3-after-a-regular-field": [(":method", "GET"), ("x-name", "value"), *without(":method")],
    "8.3.1-path-empty": instead(":path", ""),
    "8.3.1-path-missing": without(":path"),
    "8.3.1-method-missing": without(":method"),
    "8.3.1-method-empty": instead(":method", ""),
    "8.3.1-scheme-missing": without(":scheme"),
    "8.3.1-method-twice": [(":method", "GET"), *get_fields()],
    "8.3.1-scheme-twice": [(":scheme", "http"), *get_fields()],
    "8.3.1-path-twice": [(":path", "/"), *get_fields()],
    "8.3.1-authority-twice": [(":authority", "test"), *get_fields()],
    "8.3.1-nothing-but-regular-fields": [("x-name", "value")],
    "8.1.1-content-length-no-number": with_field("content-length", "x"),
    "8.1.1-content-length-signed": with_field("content-length", "+4"),
    "8.1.1-content-length-negative": with_field("content-length", "-1"),
    "8.1.1-content-length-with-digits-beyond-ascii": with_field("content-length", "\u0664"),
    "8.1.1-two-content-lengths": [*with_field("content-length", "4"), ("content-length", "5")],
}


@pytest.mark.parametrize("fields", MALFORMED_HEADS.values(), ids=MALFORMED_HEADS.keys())
def test_8_1_1_a_malformed_request_never_reaches_a_handler(peer: Peer, fields: Fields) -> None:
    play(peer, headers(1, fields), resets(1, MALFORMED), headers(3, GET), answers(3, 200))


@pytest.mark.parametrize("fields", [MALFORMED_HEADS["8.2.1-upper-case"], MALFORMED_HEADS["8.3.1-path-missing"]])
def test_8_1_1_a_malformed_request_with_a_body(peer: Peer, fields: Fields) -> None:
    play(
        peer,
        headers(1, fields, end=False),
        data(1, b"body", end=True),
        resets(1, MALFORMED),
        headers(3, GET),
        answers(3, 200),
    )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([(":path", "/"), ("x-late", "1")], id="8.1-pseudo-field"),
        pytest.param([(":status", "200")], id="8.1-status"),
        pytest.param([("X-Upper", "1")], id="8.1-upper-case"),
        pytest.param([("connection", "close")], id="8.1-connection"),
        pytest.param([("x-name", "a\r\nb: c")], id="8.1-line-break"),
    ],
)
def test_8_1_malformed_trailers(peer: Peer, fields: Fields) -> None:
    play(peer, headers(1, POST, end=False), data(1, b"body"), headers(1, fields), errs(1, MALFORMED))


@pytest.mark.parametrize(
    ("announced", "pieces"),
    [
        pytest.param("1", [b"test"], id="8.1.1-too-much"),
        pytest.param("1", [b"te", b"st"], id="8.1.1-too-much-in-pieces"),
        pytest.param("5", [b"test"], id="8.1.1-too-little"),
        pytest.param("5", [b"te", b"", b"st"], id="8.1.1-too-little-in-pieces"),
        pytest.param("0", [b"test"], id="8.1.1-something-for-nothing"),
    ],
)
@pytest.mark.parametrize("head", [get_fields("/echo", method="POST"), call_fields("Echo")], ids=["http", "grpc"])
def test_8_1_1_content_length_is_kept(peer: Peer, head: Fields, announced: str, pieces: list[bytes]) -> None:
    peer.send(headers(1, [*head, ("content-length", announced)], end=False))
    peer.send(*(data(1, piece, end=index == len(pieces) - 1) for index, piece in enumerate(pieces)))
    peer.expect_error(1, MALFORMED)


@pytest.mark.parametrize("value", ["4", "0004"])
def test_8_1_1_content_length_that_is_right(peer: Peer, value: str) -> None:
    fields = get_fields("/echo", ("content-length", value), method="POST")
    play(
        peer,
        headers(1, fields, end=False),
        data(1, b"bo"),
        data(1, b"dy", end=True, padding=9),
        answers(1, 200, b"body"),
    )


def test_8_1_1_content_length_without_a_body(peer: Peer) -> None:
    peer.send(headers(1, get_fields("/echo", ("content-length", "4"), method="POST")))
    peer.expect_error(1, MALFORMED)


def seen(peer: Peer, stream_id: int, fields: Fields) -> dict[str, object]:
    """What a handler sees of a request."""
    peer.send(headers(stream_id, fields))
    answer = peer.expect_answer(stream_id)
    assert answer.status == 200
    found: dict[str, object] = json.loads(bytes(answer.body))
    return found


def test_8_3_1_what_a_handler_sees(peer: Peer) -> None:
    head = seen(peer, 1, get_fields("/head?a=b%20c&d", ("x-name", "value"), ("user-agent", "test")))
    assert (head["method"], head["path"], head["query"]) == ("GET", "/head", "a=b%20c&d")
    assert head["headers"] == {"host": "test", "x-name": "value", "user-agent": "test"}


def test_8_3_1_the_path_is_not_decoded(peer: Peer) -> None:
    """An encoded slash would separate segments: who routes the request decodes each by itself."""
    assert seen(peer, 1, get_fields("/head?a=/%68ead"))["path"] == "/head"
    peer.send(headers(3, get_fields("/%68ead")))
    assert peer.expect_answer(3).status == 404, "the handler here compares paths as they came"


def test_8_3_1_host_must_agree_with_authority(peer: Peer) -> None:
    head = seen(peer, 1, get_fields("/head", ("host", "TEST")))
    assert head["headers"] == {"host": "test"}
    peer.send(headers(3, get_fields("/head", ("host", "elsewhere"))))
    peer.expect_reset(3, ErrorCode.PROTOCOL_ERROR)


def test_8_3_1_host_stands_in_for_a_missing_authority(peer: Peer) -> None:
    fields = [field for field in get_fields("/head", ("host", "here")) if field[0] != ":authority"]
    assert seen(peer, 1, fields)["headers"] == {"host": "here"}


def test_8_2_3_cookie_crumbs_are_joined(peer: Peer) -> None:
    head = seen(peer, 1, get_fields("/head", ("cookie", "a=b"), ("cookie", "c=d")))
    assert head["headers"]["cookie"] == "a=b; c=d"  # type: ignore[index]


def test_8_2_2_te_trailers_is_allowed(peer: Peer) -> None:
    assert seen(peer, 1, get_fields("/head", ("te", "trailers")))["path"] == "/head"


@pytest.mark.parametrize("value", ["caf\xe9", "a\tb", "\x01", "~" * 200])
def test_8_2_1_values_that_are_allowed(peer: Peer, value: str) -> None:
    peer.send(headers(1, get_fields("/head", ("x-name", value))))
    assert peer.expect_answer(1).status == 200


def test_8_4_1_the_server_never_pushes(peer: Peer) -> None:
    """It sends nothing on streams of its own, whatever was allowed."""
    for stream_id in (1, 3, 5):
        peer.get(stream_id)
        peer.expect_answer(stream_id)
    assert set(peer.answers) == {1, 3, 5}


def test_8_5_connect_is_refused(peer: Peer) -> None:
    """We are no proxy: an answer or a stream error, and no harm to other requests."""
    peer.send(headers(1, [(":method", "CONNECT"), (":authority", "elsewhere:80")], end=False))
    peer.until(lambda: 1 in peer.resets or peer.answer(1).fields is not None, "an answer or RST_STREAM")
    if peer.answer(1).fields is not None:
        assert peer.answer(1).status in (405, 501)
    play(peer, headers(3, GET), answers(3, 200))


def test_8_7_goaway_and_refused_streams_are_the_only_promise_of_no_work(peer: Peer) -> None:
    """A request that was answered is never refused afterwards."""
    peer.get(1)
    peer.expect_answer(1)
    peer.expect_alive()
    assert 1 not in peer.resets


def test_10_5_1_a_header_list_beyond_the_limit_is_answered(peer: Peer) -> None:
    """16 KiB are announced; what is larger is decoded all the same, for the sake of the table, and refused."""
    long = block(get_fields("/head", *((f"x-{index}", "v" * 1000) for index in range(17))))
    pieces = [long[at : at + 5000] for at in range(0, len(long), 5000)]
    peer.send(headers(1, pieces[0], end_headers=False))
    peer.send(*(continuation(1, piece, end_headers=piece is pieces[-1]) for piece in pieces[1:]))
    assert peer.expect_answer(1).status == 431
    play(peer, headers(3, GET), answers(3, 200, b"hello"))


def test_10_5_1_a_call_with_too_long_a_header_list(peer: Peer) -> None:
    peer.send(headers(1, call_fields("Echo", *((f"x-{index}", "v" * 1000) for index in range(17))), end=False))
    assert peer.expect_answer(1).grpc_status == 8
    play(peer, headers(3, ECHO, end=False), data(3, prefixed(b"a"), end=True), says(3, 0, [b"a"]))


def test_10_5_1_a_header_list_just_within_the_limit(peer: Peer) -> None:
    fields = list(get_fields("/head"))
    room = (1 << 14) - sum(len(name) + len(value) + 32 for name, value in fields)
    fields.append(("x", "v" * (room - 33)))
    assert seen(peer, 1, fields)["path"] == "/head"
    peer.send(headers(3, block([*fields[:-1], ("x", "v" * (room - 32))])))
    assert peer.expect_answer(3).status == 431

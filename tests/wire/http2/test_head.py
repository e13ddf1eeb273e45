"""What is a request over HTTP/2, and what of it concerns gRPC."""

from __future__ import annotations

import pytest

from modelserver.wire.http2.head import HeadReader, MalformedError, RequestHead, check_trailers, read_request_head
from modelserver.wire.http2.hpack_tables import Field

METHOD, SCHEME, PATH, AUTHORITY = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"host:1"),
)
PSEUDO = (METHOD, SCHEME, PATH, AUTHORITY)
GRPC = (*PSEUDO, (b"content-type", b"application/grpc"), (b"te", b"trailers"))


def without(field: Field, fields: tuple[Field, ...] = PSEUDO) -> tuple[Field, ...]:
    return tuple(other for other in fields if other != field)


def test_a_grpc_call() -> None:
    head = read_request_head(
        (
            *GRPC,
            (b"user-agent", b"grpc-python/1.81"),
            (b"grpc-accept-encoding", b"identity, deflate,gzip"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-timeout", b"5S"),
            (b"key", b"first"),
            (b"key", b"second"),
            (b"data-bin", b"AAEC,/w"),
        )
    )
    assert head.is_grpc
    assert (head.method, head.path, head.authority) == (b"POST", b"/a.B/C", b"host:1")
    assert (head.problem, head.http_status) == (None, 200)
    assert head.timeout_ns == 5_000_000_000
    assert head.encoding == b"gzip"
    assert head.accept_encodings == (b"identity", b"deflate", b"gzip")
    assert head.metadata == {"user-agent": "grpc-python/1.81", "key": "second", "data-bin": b"\xff"}
    assert head.metadata is head.metadata


def test_a_rest_request() -> None:
    head = read_request_head(
        (
            *PSEUDO[:2],
            (b":path", b"/v2/models/a%20b/infer?x=%20&y"),
            AUTHORITY,
            (b"content-type", b"application/json"),
            (b"content-length", b"12"),
            (b"accept", b"a"),
            (b"accept", b"b"),
            (b"cookie", b"c=1"),
            (b"cookie", b"d=2"),
        )
    )
    assert not head.is_grpc
    assert head.http_status == 200
    assert head.content_length == 12
    assert (head.http.method, head.http.path, head.http.query) == ("POST", "/v2/models/a%20b/infer", "x=%20&y")
    assert head.http.headers == {
        "host": "host:1",
        "content-type": "application/json",
        "content-length": "12",
        "accept": "a, b",
        "cookie": "c=1; d=2",
    }
    assert head.http is head.http


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((), id="none"),
        pytest.param(without(METHOD), id="no method"),
        pytest.param(without(SCHEME), id="no scheme"),
        pytest.param(without(PATH), id="no path"),
        pytest.param((METHOD, *PSEUDO), id="method twice"),
        pytest.param((*PSEUDO, PATH), id="path twice"),
        pytest.param((*PSEUDO[:3], (b":authority", b"a"), (b":authority", b"b")), id="authority twice"),
        pytest.param((*PSEUDO, (b":status", b"200")), id="response's"),
        pytest.param((*PSEUDO, (b":protocol", b"websocket")), id="extended CONNECT"),
        pytest.param((*PSEUDO[:3], (b":other", b"")), id="unknown pseudo"),
        pytest.param((METHOD, SCHEME, (b"a", b""), PATH), id="pseudo late"),
        pytest.param((*PSEUDO[:3], (b"a", b""), AUTHORITY), id="authority late"),
        pytest.param((*PSEUDO[:2], (b":path", b""), AUTHORITY), id="empty path"),
        pytest.param((*PSEUDO[:2], (b":path", b"a"), AUTHORITY), id="relative path"),
        pytest.param((*PSEUDO[:2], (b":path", b"*"), AUTHORITY), id="star"),
        pytest.param((*PSEUDO[:2], (b":path", b"/a b"), AUTHORITY), id="blank in path"),
        pytest.param((*PSEUDO[:2], (b":path", b"/\xc3\xa9"), AUTHORITY), id="non-ASCII path"),
        pytest.param(((b":method", b"CONNECT"), AUTHORITY), id="CONNECT"),
        pytest.param(((b":method", b"CONNECT"), *PSEUDO[1:]), id="CONNECT with path"),
        pytest.param(((b":method", b""), *PSEUDO[1:]), id="empty method"),
        pytest.param(((b":method", b"P OST"), *PSEUDO[1:]), id="method not a token"),
        pytest.param((*PSEUDO, (b"Upper", b"a")), id="upper case"),
        pytest.param((*PSEUDO, (b"", b"a")), id="empty name"),
        pytest.param((*PSEUDO, (b"a b", b"a")), id="blank in name"),
        pytest.param((*PSEUDO, (b"a:b", b"a")), id="colon in name"),
        pytest.param((*PSEUDO, (b"\xc3\xa9", b"a")), id="non-ASCII name"),
        pytest.param((*PSEUDO, (b"connection", b"close")), id="connection"),
        pytest.param((*PSEUDO, (b"keep-alive", b"1")), id="keep-alive"),
        pytest.param((*PSEUDO, (b"proxy-connection", b"close")), id="proxy-connection"),
        pytest.param((*PSEUDO, (b"transfer-encoding", b"chunked")), id="transfer-encoding"),
        pytest.param((*PSEUDO, (b"upgrade", b"h2c")), id="upgrade"),
        pytest.param((*PSEUDO, (b"te", b"gzip")), id="te"),
        pytest.param((*PSEUDO, (b"te", b"trailers"), (b"te", b"trailers")), id="te twice"),
        pytest.param((*PSEUDO, (b"a", b"b\0")), id="NUL"),
        pytest.param((*PSEUDO, (b"a", b"b\rc")), id="CR"),
        pytest.param((*PSEUDO, (b"a", b"b\nc")), id="LF"),
        pytest.param((*PSEUDO, (b"a", b" b")), id="blank first"),
        pytest.param((*PSEUDO, (b"a", b"b\t")), id="tab last"),
        pytest.param((*PSEUDO, (b"a", b" ")), id="only a blank"),
        pytest.param((*PSEUDO, (b"content-length", b"-1")), id="negative length"),
        pytest.param((*PSEUDO, (b"content-length", b"")), id="empty length"),
        pytest.param((*PSEUDO, (b"content-length", b"1" * 20)), id="long length"),
        pytest.param((*PSEUDO, (b"content-length", b"1"), (b"content-length", b"1")), id="length twice"),
        pytest.param((*PSEUDO, (b"host", b"a"), (b"host", b"a")), id="host twice"),
        pytest.param((*GRPC, (b"grpc-timeout", b"1S"), (b"grpc-timeout", b"1S")), id="timeout twice"),
        pytest.param((*GRPC, (b"content-type", b"text/html")), id="content type twice"),
        pytest.param((*PSEUDO[:3], (b"grpc-timeout", b"1S"), *GRPC[3:]), id="timeout among pseudo"),
        pytest.param(((b"grpc-timeout", b"1S"), *GRPC), id="timeout before pseudo"),
    ],
)
def test_what_is_no_request_is_malformed(fields: tuple[Field, ...]) -> None:
    with pytest.raises(MalformedError):
        read_request_head(fields)
    reader = HeadReader()
    for _ in range(2):
        with pytest.raises(MalformedError):
            reader.read(fields)


@pytest.mark.parametrize(
    "extra",
    [
        ((b"a", b""),),
        ((b"a", b"b  c"),),
        ((b"a", b"\xc3\xa9"),),
        ((b"te", b"trailers"),),
        ((b"content-length", b"0"),),
        ((b"!#$%&'*+-.^_`|~09az", b"a"),),
        ((b"host", b"HOST:1"),),
        ((b"a", b"1"), (b"a", b"2")),
    ],
)
def test_these_are_requests(extra: tuple[Field, ...]) -> None:
    assert read_request_head((*PSEUDO, *extra)).authority == b"host:1"


def test_options_may_ask_for_everything() -> None:
    head = read_request_head(((b":method", b"OPTIONS"), SCHEME, (b":path", b"*")))
    assert head.http.path == "*"


def test_the_host_stands_in_for_a_missing_authority() -> None:
    head = read_request_head((METHOD, SCHEME, PATH, (b"host", b"from-host")))
    assert head.authority == b"from-host"
    assert head.http.headers == {"host": "from-host"}


def test_the_authority_is_the_host() -> None:
    assert read_request_head((*PSEUDO, (b"host", b"Host:1"))).http.headers == {"host": "host:1"}


@pytest.mark.parametrize("host", [b"other", b"host:2", b"host", b""])
def test_a_host_unlike_the_authority_is_malformed(host: bytes) -> None:
    """A proxy may have looked at the one, and we at the other (RFC 9113, 8.3.1)."""
    with pytest.raises(MalformedError, match="host differs"):
        read_request_head((*PSEUDO, (b"host", host)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_pseudo_headers_have_no_order(order: tuple[int, ...]) -> None:
    assert read_request_head(tuple(PSEUDO[index] for index in order)).path == b"/a.B/C"


@pytest.mark.parametrize(
    ("content_type", "is_grpc", "http_status"),
    [
        (b"application/grpc", True, 200),
        (b"application/grpc+proto", True, 200),
        (b"application/grpc;charset=utf-8", True, 200),
        (b"application/grpc-web", False, 415),
        (b"application/grpc-web+proto", False, 415),
        (b"application/grpcx", False, 415),
        (b"application/json", False, 200),
        (b"", False, 200),
    ],
)
def test_the_content_type_tells_grpc(content_type: bytes, is_grpc: bool, http_status: int) -> None:
    head = read_request_head((*PSEUDO, (b"content-type", content_type)))
    assert (head.is_grpc, head.http_status) == (is_grpc, http_status)


def test_a_grpc_call_by_get_is_refused() -> None:
    head = read_request_head(((b":method", b"GET"), *GRPC[1:]))
    assert head.http_status == 405
    assert head.problem == (13, "gRPC calls are POST requests, this is GET")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ((b"grpc-timeout", b"5"), "grpc-timeout b'5' is not a number"),
        ((b"grpc-timeout", b"S"), "is not a number"),
        ((b"grpc-timeout", b""), "is not a number"),
        ((b"x-bin", b"A"), "not base64"),
        ((b"x-bin", b"AA,*"), "not base64"),
    ],
)
def test_what_is_wrong_for_grpc_only_becomes_a_status(field: Field, text: str) -> None:
    for head in (read_request_head((*GRPC, field)), HeadReader().read((*GRPC, field))):
        assert head.problem is not None
        assert head.problem[0] == 13
        assert text in head.problem[1]
        assert head.http_status == 200


def test_identity_is_no_encoding() -> None:
    assert read_request_head((*GRPC, (b"grpc-encoding", b"identity"))).encoding == b""


def test_reserved_binary_fields_are_not_decoded() -> None:
    head = read_request_head((*GRPC, (b"grpc-trace-bin", b"*")))
    assert head.problem is None
    assert head.metadata == {}


def read_slots(head: RequestHead) -> dict[str, object]:
    return {name: getattr(head, name) for name in RequestHead.__slots__ if name[0] != "_" and name != "fields"}


def test_heads_that_differ_in_the_timeout_share_the_rest() -> None:
    reader = HeadReader()
    fields = [(*GRPC, (b"grpc-timeout", b"%dm" % wait), (b"key", b"value")) for wait in (1, 2, 3)]
    heads = [reader.read(each) for each in fields]
    assert [head.timeout_ns for head in heads] == [1_000_000, 2_000_000, 3_000_000]
    assert heads[0].metadata is heads[2].metadata
    assert heads[0].http is heads[2].http
    for head, each in zip(heads, fields, strict=True):
        assert read_slots(head) == read_slots(read_request_head(each))


def test_heads_are_told_apart_by_every_other_field() -> None:
    reader = HeadReader()
    for _ in range(2):
        for user in (b"one", b"two"):
            head = reader.read((*GRPC, (b"grpc-timeout", b"1S"), (b"user", user)))
            assert head.metadata == {"user": user.decode()}


def test_the_timeout_may_move() -> None:
    reader = HeadReader()
    timeout, field = (b"grpc-timeout", b"1S"), (b"a", b"b")
    for fields in ((*GRPC, timeout), (*GRPC, field, timeout), (*GRPC, timeout, field), GRPC, (*GRPC, timeout)):
        assert reader.read(fields).timeout_ns == (None if fields == GRPC else 1_000_000_000)


def test_the_memo_stays_with_the_head_it_was_derived_from() -> None:
    reader = HeadReader()
    first = reader.read((*GRPC, (b"grpc-timeout", b"1S")))
    first.keep("handler")
    assert first.memo == "handler"
    assert reader.read((*GRPC, (b"grpc-timeout", b"2S"))).memo == "handler"


def test_the_reader_forgets() -> None:
    reader = HeadReader()
    for number in range(1000):
        path = b"/a.B/%d" % number
        head = reader.read((*GRPC[:2], (b":path", path), *GRPC[3:], (b"grpc-timeout", b"1S")))
        assert head.path == path
    large = reader.read((*GRPC, (b"grpc-timeout", b"1S"), (b"a", b"b" * 5000)))
    assert large.timeout_ns == 1_000_000_000
    assert len(reader._memory.known) <= 64


@pytest.mark.parametrize("fields", [(), ((b"grpc-status", b"0"),), ((b"a", b"b"), (b"a", b"c"))])
def test_these_are_trailers(fields: tuple[Field, ...]) -> None:
    check_trailers(fields)


@pytest.mark.parametrize(
    "field", [(b":path", b"/"), (b":status", b"200"), (b"A", b""), (b"connection", b"a"), (b"a", b"\n"), (b"", b"")]
)
def test_these_are_not_trailers(field: Field) -> None:
    with pytest.raises(MalformedError):
        check_trailers(((b"a", b"b"), field))

"""Requests that two readers could read differently, or that nobody should send: what each is answered with.

None of them may make a second request of what follows it.
"""

from __future__ import annotations

HOST = b"Host: test\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: test\r\n\r\n"


def _post(lines: bytes, body: bytes = b"") -> bytes:
    return b"POST /a HTTP/1.1\r\n" + HOST + lines + b"\r\n" + body


_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_END = b"0\r\n\r\n"

# By name: what is sent, and the status of the answer that ends the connection.
REFUSED: dict[str, tuple[bytes, int]] = {
    # Where a body ends.
    "length and chunked": (_post(b"Content-Length: 3\r\n" + _CHUNKED, _END), 400),
    "chunked and length": (_post(_CHUNKED + b"Content-Length: 3\r\n", _END), 400),
    "two lengths": (_post(b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abcd"), 400),
    "the same length twice": (_post(b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"), 400),
    "list of lengths": (_post(b"Content-Length: 3, 3\r\n", b"abc"), 400),
    "signed length": (_post(b"Content-Length: +3\r\n", b"abc"), 400),
    "negative length": (_post(b"Content-Length: -3\r\n", b"abc"), 400),
    "hexadecimal length": (_post(b"Content-Length: 0x3\r\n", b"abc"), 400),
    "empty length": (_post(b"Content-Length:\r\n", b""), 400),
    "length that overflows": (_post(b"Content-Length: 18446744073709551616\r\n", b""), 400),
    "length with a blank inside": (_post(b"Content-Length: 1 2\r\n", b"a"), 400),
    "length over the limit": (_post(b"Content-Length: 99999999999999\r\n", b""), 413),
    "unknown coding": (_post(b"Transfer-Encoding: gzip, chunked\r\n", _END), 501),
    "unknown coding last": (_post(b"Transfer-Encoding: chunked, gzip\r\n", _END), 400),
    "chunked twice": (_post(b"Transfer-Encoding: chunked, chunked\r\n", _END), 400),
    "two codings": (_post(_CHUNKED + _CHUNKED, _END), 400),
    "like chunked": (_post(b"Transfer-Encoding: xchunked\r\n", _END), 400),
    "identity": (_post(b"Transfer-Encoding: identity\r\n", b""), 400),
    "empty coding": (_post(b"Transfer-Encoding:\r\n", b""), 400),
    "quoted coding": (_post(b'Transfer-Encoding: "chunked"\r\n', _END), 400),
    "coding behind a tab": (_post(b"Transfer-Encoding:\x0bchunked\r\n", _END), 400),
    "chunked in HTTP/1.0": (b"POST /a HTTP/1.0\r\n" + HOST + _CHUNKED + b"\r\n" + _END, 400),
    # Chunks.
    "chunk size with a sign": (_post(_CHUNKED, b"+3\r\nabc\r\n" + _END), 400),
    "chunk size with 0x": (_post(_CHUNKED, b"0x3\r\nabc\r\n" + _END), 400),
    "chunk size with a blank": (_post(_CHUNKED, b"3 \r\nabc\r\n" + _END), 400),
    "chunk size behind a blank": (_post(_CHUNKED, b" 3\r\nabc\r\n" + _END), 400),
    "no chunk size": (_post(_CHUNKED, b"\r\nabc\r\n" + _END), 400),
    "chunk size that overflows": (_post(_CHUNKED, b"10000000000000003\r\nabc\r\n" + _END), 400),
    "chunk over the limit": (_post(_CHUNKED, b"fffffffffff\r\nabc\r\n"), 413),
    "chunk longer than its size": (_post(_CHUNKED, b"3\r\nabcd\r\n" + _END), 400),
    "chunk size line ends with LF": (_post(_CHUNKED, b"3\nabc\r\n" + _END), 400),
    "chunk ends with LF": (_post(_CHUNKED, b"3\r\nabc\n" + _END), 400),
    "chunk extension with LF": (_post(_CHUNKED, b"3;a\nb\r\nabc\r\n" + _END), 400),
    "last chunk ends with LF": (_post(_CHUNKED, b"0\n\r\n"), 400),
    "length as trailer": (_post(_CHUNKED, b"0\r\nContent-Length: 9\r\n\r\n"), 400),
    "coding as trailer": (_post(_CHUNKED, b"0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400),
    # Lines and characters.
    "LF ends the request line": (b"GET /a HTTP/1.1\n" + HOST + b"\r\n", 400),
    "LF ends a header": (b"GET /a HTTP/1.1\r\nHost: test\nX: y\r\n\r\n", 400),
    "LF ends the head": (b"GET /a HTTP/1.1\nHost: test\n\n", 400),
    "CR in a header": (_post(b"X: a\rContent-Length: 3\r\n"), 400),
    "NUL in a header": (_post(b"X: a\0b\r\n"), 400),
    "control character in a name": (_post(b"X\x01: a\r\n"), 400),
    "blank before the colon": (_post(b"Content-Length : 3\r\n", b"abc"), 400),
    "blank before a name": (_post(b"X: a\r\n Content-Length: 3\r\n"), 400),
    "blank before the first name": (b"GET /a HTTP/1.1\r\n " + HOST + b"\r\n", 400),
    "line without a colon": (_post(b"Content-Length\r\n"), 400),
    "no name": (_post(b": a\r\n"), 400),
    # The request line.
    "control character in the target": (b"GET /a\x01b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "target that is not ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "blank in the target": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two blanks": (b"GET  /a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "relative target": (b"GET a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "other scheme": (b"GET ftp://test/a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "user in the target": (b"GET http://user@test/a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "lower-case method": (b"get /a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "unknown method": (b"FETCH /a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "HTTP/0.9": (b"GET /a\r\n" + HOST + b"\r\n", 400),
    "HTTP/0.9 by name": (b"GET /a HTTP/0.9\r\n" + HOST + b"\r\n", 505),
    "HTTP/1.2": (b"GET /a HTTP/1.2\r\n" + HOST + b"\r\n", 400),
    "HTTP/2.0": (b"GET /a HTTP/2.0\r\n" + HOST + b"\r\n", 505),
    "HTTP/9.9": (b"GET /a HTTP/9.9\r\n" + HOST + b"\r\n", 400),
    "RTSP": (b"OPTIONS /a RTSP/1.0\r\n" + HOST + b"\r\n", 400),
    "no HTTP": (b"\x16\x03\x01 certainly not\r\n\r\n", 400),
    "several empty lines": (b"\r\n\r\n\r\n" + SMUGGLED, 400),
    # Hosts, tunnels, expectations.
    "no host": (b"GET /a HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /a HTTP/1.1\r\n" + HOST + b"Host: other\r\n\r\n", 400),
    "host with a path": (b"GET /a HTTP/1.1\r\nHost: test/b\r\n\r\n", 400),
    "CONNECT": (b"CONNECT test:80 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "unknown expectation": (_post(b"Expect: wonders\r\n"), 417),
}

# What is answered, though some read it otherwise: what is sent, and the bodies that its requests have.
SERVED: dict[str, tuple[bytes, list[bytes]]] = {
    "name with an underscore": (_post(b"Content_Length: 30\r\n"), [b""]),
    "target with a host of its own": (b"GET http://test/a HTTP/1.1\r\nHost: other\r\n\r\n", [b""]),
    "offer to upgrade": (b"GET /a HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", [b""]),
    # curl --http2 sends these.
    "upgrade with a body": (
        _post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n" % len(SMUGGLED), SMUGGLED),
        [SMUGGLED],
    ),
    "upgrade with chunks": (
        _post(b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + _CHUNKED, b"3\r\nabc\r\n" + _END),
        [b"abc"],
    ),
    "chunk extensions": (_post(_CHUNKED, b"3;a=b;c\r\nabc\r\n" + _END), [b"abc"]),
    "trailers": (_post(_CHUNKED, b"3\r\nabc\r\n0\r\nX: y\r\nZ:\r\n\r\n"), [b"abc"]),
    "length with zeros": (_post(b"Content-Length: 003\r\n", b"abc"), [b"abc"]),
    "empty line before the request": (b"\r\n" + _post(b"Content-Length: 3\r\n", b"abc"), [b"abc"]),
    "coding in capitals": (_post(b"TRANSFER-ENCODING: CHUNKED\r\n", b"3\r\nabc\r\n" + _END), [b"abc"]),
    "a body of GET": (b"GET /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc", [b"abc"]),
}

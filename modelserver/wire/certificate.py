"""When certificates expire: the one field that is read here, as X.509 defines it (RFC 5280, 4.1)."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

# OpenSSL takes the older names, too.
_PEM: Final = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
# Tags of DER (X.690).
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18


def first_not_after_s(pem: bytes) -> float | None:
    """When the first of the certificates in a PEM file expires, in seconds since 1970; None if it has none.

    Raises ValueError when one of them cannot be read.
    """
    try:
        return min(map(_not_after_s, _PEM.findall(pem)), default=None)
    except (IndexError, ValueError) as error:
        raise ValueError(f"a certificate in it is not as X.509 has them: {error}") from None


def _not_after_s(body: bytes) -> float:
    der = ssl.PEM_cert_to_DER_cert(f"{ssl.PEM_HEADER}\n{body.decode('ascii').strip()}\n{ssl.PEM_FOOTER}")
    [(_, certificate), *_] = _elements(der)  # a trusted one is followed by the purposes that it is trusted for
    (_, signed), *_ = _elements(certificate)
    fields = [field for field in _elements(signed) if field[0] != _VERSION]
    _serial, _algorithm, _issuer, (_, validity), *_ = fields
    _not_before, (tag, written) = _elements(validity)
    return _moment_s(tag, written.decode("ascii"))


def _moment_s(tag: int, text: str) -> float:
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"a time has the tag 0x17 or 0x18, got {tag:#x}")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of DER one behind the other: tag and content."""
    position = 0
    while position < len(data):
        tag, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            end = position + (length & 0x7F)
            position, length = end, int.from_bytes(data[position:end], "big")
        yield tag, data[position : position + length]
        position += length

"""When certificates expire, as X.509 writes it down in two ways."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from support.certificates import Authority

from modelserver.wire.tls import first_not_after_s

# The date from which on years have four digits, and the one before.
MOMENTS = [
    datetime.datetime(2027, 3, 4, 5, 6, 7, tzinfo=datetime.UTC),
    datetime.datetime(2049, 12, 31, 23, 59, 59, tzinfo=datetime.UTC),
    datetime.datetime(2050, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC),
    datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: str(moment.year))
def test_the_end_of_a_certificate_is_read(tmp_path: Path, moment: datetime.datetime) -> None:
    pem = Authority(tmp_path).pair("server", not_after=moment).certificate.read_bytes()
    assert first_not_after_s(pem) == moment.timestamp()


def test_the_first_of_a_chain_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    later, first = (authority.pair(f"of-{moment.year}", not_after=moment) for moment in (MOMENTS[2], MOMENTS[0]))
    chain = b"Bag Attributes: none\r\n" + later.certificate.read_bytes().replace(b"\n", b"\r\n")
    assert first_not_after_s(chain) == MOMENTS[2].timestamp()
    both = chain + first.certificate.read_bytes() + first.key.read_bytes()
    assert first_not_after_s(both) == MOMENTS[0].timestamp()
    renamed = both.replace(b"BEGIN CERT", b"BEGIN TRUSTED CERT").replace(b"END CERT", b"END TRUSTED CERT")
    assert first_not_after_s(renamed) == MOMENTS[0].timestamp()


@pytest.mark.parametrize("pem", [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nhalf"])
def test_a_file_may_have_none(pem: bytes) -> None:
    assert first_not_after_s(pem) is None


@pytest.mark.parametrize("body", [b"", b"%%%%", b"MAA=", b"MAMCAQE=", b"MIIB", b"ME8=" * 40, b"\xff\xfe"])
def test_what_is_none_is_told_by_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="certificate"):
        first_not_after_s(b"-----BEGIN CERTIFICATE-----\n" + body + b"\n-----END CERTIFICATE-----\n")

"""TLS for a port: the certificate's files, the negotiated protocols, and new files while the server runs."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from modelserver.errors import InvalidArgumentError
from modelserver.telemetry.file_reloads import FileReloads

# When certificates expire: the one field that is read here, as X.509 defines it (RFC 5280, 4.1).

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


_logger = logging.getLogger(__name__)

# The order is our preference; a client without ALPN is asked what it speaks by its first bytes.
ALPN = ("h2", "http/1.1")
# TLS 1.2 with forward secrecy and authenticated encryption only, as HTTP/2 wants it (RFC 9113, 9.2.2);
# the suites of TLS 1.3 are all of that kind.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

# Number, time of last change and size of each file: a change means that they were replaced.
_Fingerprint = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `client_ca` is empty when clients need no certificate; `flags` are those that named the files."""

    certificate: str
    key: str
    client_ca: str = ""
    flags: tuple[str, str, str] = ("--tls-cert", "--tls-key", "--tls-client-ca")

    def context(self) -> ssl.SSLContext:
        """The files as they are now. Raises InvalidArgumentError, naming flag and file, when they are invalid."""
        for path, flag in zip((self.certificate, self.key, self.client_ca), self.flags, strict=True):
            _check_readable(path, flag)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_ciphers(_CIPHERS)
        context.set_alpn_protocols(list(ALPN))
        self._load_certificate(context)
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise InvalidArgumentError(
                    f"{self.flags[2]}: '{self.client_ca}' holds no certificates in PEM form: {_reason(error)}"
                ) from None
        return context

    def fingerprint(self) -> _Fingerprint:
        """A stamp that changes when files are replaced; empty while one is missing."""
        try:
            stats = [Path(path).stat() for path in (self.certificate, self.key, self.client_ca) if path]
        except OSError:
            return ()
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)

    def not_after_s(self) -> dict[str, float]:
        """By flag, when the first certificate of its file expires (Unix time), of files that `context` has taken."""
        found = {}
        for path, flag in ((self.certificate, self.flags[0]), (self.client_ca, self.flags[2])):
            try:
                seconds = first_not_after_s(Path(path).read_bytes()) if path else None
            except (OSError, ValueError) as error:  # OpenSSL accepts it, but our parser does not
                _logger.warning("%s: cannot tell when '%s' expires: %s", flag, path, error)
                continue
            if seconds is not None:
                found[flag] = seconds
        return found

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        try:
            # A passphrase would be asked for on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        except _EncryptedKeyError:
            raise InvalidArgumentError(
                f"{self.flags[1]}: the key in '{self.key}' has a passphrase; store it without one"
            ) from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise InvalidArgumentError(
                    f"{self.flags[1]}: '{self.key}' is not the key of the certificate in '{self.certificate}' "
                    f"({self.flags[0]})"
                ) from None
            raise InvalidArgumentError(
                f"{self.flags[0]}, {self.flags[1]}: '{self.certificate}' and '{self.key}' must be a certificate "
                f"(followed by those between it and the authority's) and its key, in PEM form: {_reason(error)}"
            ) from None


class TlsReloader:
    """The TLS of a port over time: changed files are read again; if they are broken, the old ones stay."""

    def __init__(self, files: TlsFiles, reloads: FileReloads | None = None) -> None:
        """Raises InvalidArgumentError when the files are invalid. `reloads` counts the results of later reads."""
        self._files = files
        self._reloads = reloads or FileReloads()
        # Taken before the files are read, so that the next check sees changes made meanwhile.
        self._read = self._seen = files.fingerprint()
        # For new connections.
        self.context = files.context()
        self._reloads.took(files.flags[0], files.not_after_s())

    def look(self) -> None:
        """Read files that have changed, once two looks in a row find them the same: certificate and key are
        seldom replaced in one moment."""
        seen, self._seen = self._seen, self._files.fingerprint()
        if self._seen and self._seen == seen != self._read:
            self._read = seen
            try:
                self.context = self._files.context()
            except InvalidArgumentError as error:
                _logger.error("the new TLS files are not used, the old ones stay: %s", error.message)
                self._reloads.failed(self._files.flags[0], seen)
            else:
                self._reloads.took(self._files.flags[0], self._files.not_after_s())
                _logger.info("took the new TLS files %s and %s", self._files.certificate, self._files.key)


class _EncryptedKeyError(Exception):
    """The key needs a passphrase."""


def _no_passphrase() -> str:
    raise _EncryptedKeyError


def _check_readable(path: str, flag: str) -> None:
    if not path:
        return
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{flag}: cannot read '{path}': {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()

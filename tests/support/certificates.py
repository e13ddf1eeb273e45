"""Certificates made when they are needed: an authority of our own, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1 and localhost; `certificate` is what peers trust."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = directory / f"{name}.pem"
        end = datetime.datetime.now(datetime.UTC) + _DAY
        self._write(self.certificate, self._sign(self._name, self._key.public_key(), is_authority=True, not_after=end))

    def pair(self, name: str, *, is_expired: bool = False, not_after: datetime.datetime | None = None) -> Pair:
        """A new certificate whose common name, and the stem of its files, is `name`. It is good for a day by itself."""
        end = not_after or datetime.datetime.now(datetime.UTC) + (-9 if is_expired else 1) * _DAY
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        pair = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        self._write(pair.certificate, self._sign(subject, key.public_key(), is_authority=False, not_after=end))
        pair.key.write_bytes(private_pem(key))
        return pair

    def client_context(self, alpn: tuple[str, ...] = (), pair: Pair | None = None) -> ssl.SSLContext:
        """TLS of a client that trusts this authority, offers `alpn`, and shows `pair` when asked."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if alpn:
            context.set_alpn_protocols(list(alpn))
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return context

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_authority: bool, not_after: datetime.datetime
    ) -> x509.Certificate:
        begin = min(not_after, datetime.datetime.now(datetime.UTC)) - _DAY
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            # Python 3.13 insists on what a key is for, and on what tells certificates of the same name apart.
            .add_extension(_usage(is_authority=is_authority), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @staticmethod
    def _write(path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return _pem(key, serialization.NoEncryption())


def encrypted(pem: bytes, passphrase: bytes) -> bytes:
    """The same key, which now needs `passphrase`."""
    key = serialization.load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey), "the authority makes no other keys"
    return _pem(key, serialization.BestAvailableEncryption(passphrase))


def _pem(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

"""A TLS 1.3 client that makes its records itself: what no library would send."""

from __future__ import annotations

import socket
import ssl
import struct
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

HANDSHAKE, APPLICATION_DATA = 22, 23
# A message that changes the client's keys, without its last byte: whether it asks the server to change its own, too.
HALF_KEY_UPDATE = b"\x18\0\0\x01"


class RawTls:
    """The handshake is a library's, which blocks; the keys are taken from it (RFC 8446, 7.3)."""

    def __init__(self, connected: socket.socket, trust: ssl.SSLContext, key_log: Path) -> None:
        """`trust` is this client's own, and changed."""
        trust.minimum_version = ssl.TLSVersion.TLSv1_3
        trust.keylog_filename = str(key_log)
        self.socket = connected
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        is_done = False
        while not is_done:
            try:
                tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                connected.sendall(outgoing.read())
                incoming.write(connected.recv(65536))
        connected.sendall(outgoing.read())
        cipher = tls.cipher()
        assert cipher is not None
        assert "AES_256_GCM" in cipher[0], f"expected AES-256-GCM, got {cipher[0]}"
        self._use(_traffic_secret(key_log))

    def send(self, *records: bytes) -> None:
        self.socket.sendall(b"".join(records))

    def record(self, data: bytes, kind: int = APPLICATION_DATA) -> bytes:
        """`data` as one record of this kind: to be sent in the order in which they are made."""
        plain = data + bytes((kind,))
        head = struct.pack(">BHH", APPLICATION_DATA, 0x0303, len(plain) + 16)
        nonce = (self._iv ^ self._number).to_bytes(12, "big")
        self._number += 1
        return head + self._key.encrypt(nonce, plain, head)

    def key_update(self) -> bytes:
        """Change our keys, and have the server change its own, which it says in a record (RFC 8446, 4.6.3)."""
        record = self.record(HALF_KEY_UPDATE + b"\1", HANDSHAKE)
        self._use(_expand(self._secret, b"traffic upd", 48))
        return record

    def _use(self, secret: bytes) -> None:
        self._secret = secret
        self._key = AESGCM(_expand(secret, b"key", 32))
        self._iv = int.from_bytes(_expand(secret, b"iv", 12), "big")
        self._number = 0


def _traffic_secret(key_log: Path) -> bytes:
    lines = (line.split() for line in key_log.read_text().splitlines())
    return next(bytes.fromhex(line[2]) for line in lines if line and line[0] == "CLIENT_TRAFFIC_SECRET_0")


def _expand(secret: bytes, label: bytes, size: int) -> bytes:
    """HKDF-Expand-Label (RFC 8446, 7.1)."""
    label = b"tls13 " + label
    info = struct.pack(">HB", size, len(label)) + label + b"\0"
    return HKDFExpand(hashes.SHA384(), size, info).derive(secret)

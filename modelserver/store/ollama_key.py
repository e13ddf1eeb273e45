"""The key by which Ollama's registry knows a user: `ollama` makes it, and its public half is added to an account."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from pathlib import Path

from modelserver.errors import InvalidArgumentError, UnsupportedError

# What is signed of the body of a request for a token, which has none.
_NO_BODY = base64.b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()


def key_path() -> Path:
    """Where the key of this user is, if there is one."""
    return Path.home() / ".ollama" / "id_ed25519"


def new_stamp() -> dict[str, str]:
    """What makes a request for a token one that cannot be sent again: its time, and a number that is used once."""
    return {"ts": str(int(time.time())), "nonce": secrets.token_urlsafe(16)}


def signature(url: str) -> str:
    """The `Authorization` of a GET of this URL: the public key, and its signature.

    Raises InvalidArgumentError for a key that cannot be used, and UnsupportedError without the package for it.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
    except ModuleNotFoundError:
        raise UnsupportedError(
            "this registry knows users by a signature: install the package for it by 'pip install cryptography'"
        ) from None
    path = key_path()
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgumentError(f"the key {path} cannot be used: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidArgumentError(f"the key {path} is not an Ed25519 key")
    _, public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split(" ")[:2]
    signed = key.sign(f"GET,{url},{_NO_BODY}".encode())
    return f"{public}:{base64.b64encode(signed).decode()}"

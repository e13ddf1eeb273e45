"""HTTP for pulls and pushes: redirects, proxies of the environment, tokens of registries, requests
signed by Ollama's key. Blocking.

Credentials go to the host that they are for, and never over a connection without TLS to another machine.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import secrets
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from modelserver.errors import (
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.store.names import is_loopback

TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_ANSWER_BYTES = 1 << 20
_CHALLENGE = re.compile(r'([A-Za-z]+)="([^"]*)"')


class Reply:
    """An answer whose body is not read yet; a context manager that closes it."""

    def __init__(self, response: Any, url: str) -> None:
        self.status: int = response.status
        self.url = url
        self._response = response

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._response.close()

    def header(self, name: str) -> str:
        """The header's value; empty if there is none."""
        return str(self._response.headers.get(name) or "")

    def read(self, max_bytes: int) -> bytes:
        """The next bytes, empty at the end. Raises UnavailableError when the connection breaks."""
        try:
            return bytes(self._response.read(max_bytes))
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"the connection to {_host_of(self.url)} broke: {error}") from None

    def read_all(self, max_bytes: int = _MAX_ANSWER_BYTES) -> bytes:
        """The whole of a small body. Raises InvalidArgumentError for a larger one."""
        content = bytearray()
        while chunk := self.read(_CHUNK):
            content += chunk
            if len(content) > max_bytes:
                raise InvalidArgumentError(f"{_host_of(self.url)} answers with more than {max_bytes} bytes")
        return bytes(content)


class Body:
    """Part of a file as the body of a request, read while it is sent; `report` gets the number of bytes sent."""

    def __init__(self, path: Path, start: int, size_bytes: int, report: Callable[[int], None]) -> None:
        self.size_bytes = size_bytes
        self._path = path
        self._start = start
        self._report = report

    def __iter__(self) -> Iterator[bytes]:
        """From the beginning each time: a request may have to be sent again."""
        left = self.size_bytes
        with self._path.open("rb") as file:
            file.seek(self._start)
            while left and (chunk := file.read(min(left, _CHUNK))):
                left -= len(chunk)
                yield chunk
                self._report(self.size_bytes - left)


class Transport:
    """Sends requests. `is_insecure` allows HTTP without TLS to other machines than this one."""

    def __init__(self, *, is_insecure: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self._is_insecure = is_insecure
        self._timeout_s = timeout_s
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        ):
            self._opener.add_handler(handler)

    def open(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: Body | bytes | None = None
    ) -> Reply:
        """A successful answer, after redirects. `Authorization` is dropped when one leads to another host.

        Raises UnavailableError if nothing answers, and for an error answer the ServerError of its status.
        """
        sent = {"User-Agent": "modelserver", "Accept-Encoding": "identity", **(headers or {})}
        for _ in range(_MAX_REDIRECTS):
            reply = self._send(method, url, sent, body)
            if reply.status not in _REDIRECTS or not reply.header("Location"):
                break
            with reply:
                target = urljoin(url, reply.header("Location"))
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                raise InvalidArgumentError(f"{_host_of(url)} redirects to an address without TLS")
            if _origin(target) != _origin(url):
                sent.pop("Authorization", None)
            if reply.status == 303 and method != "HEAD":
                method, body = "GET", None
            url = target
        if 200 <= reply.status < 300:
            return reply
        with reply:
            raise _error_of(reply)

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes | None) -> Reply:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgumentError(f"expected an address of HTTP, got '{url[:200]}'")
        if parts.scheme == "http" and not self._is_insecure and not is_loopback(parts.netloc.rpartition("@")[2]):
            raise InvalidArgumentError(f"{url[:200]} is without TLS; --insecure allows it")
        sent = dict(headers)
        data: Any = body
        if isinstance(body, Body):
            sent["Content-Length"] = str(body.size_bytes)
        if body is not None:
            sent.setdefault("Content-Type", "application/octet-stream")
        request = urllib.request.Request(url, data=data, headers=sent, method=method)  # noqa: S310 - checked above
        try:
            return Reply(self._opener.open(request, timeout=self._timeout_s), url)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UnavailableError(f"cannot reach {_host_of(url)}: {reason or type(error).__name__}") from None


class RegistryTransport(Transport):
    """Also answers a registry's demand for a token (`WWW-Authenticate: Bearer`) or a password (`Basic`)."""

    def __init__(self, *, is_insecure: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(is_insecure=is_insecure, timeout_s=timeout_s)
        self._authorizations: dict[tuple[str, str], str] = {}  # by host and scope

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes | None) -> Reply:
        scope = "pull" if method in ("GET", "HEAD") else "push"
        key = (_origin(url), scope)
        known = {"Authorization": self._authorizations[key]} if key in self._authorizations else {}
        reply = super()._send(method, url, {**headers, **known}, body)
        if reply.status != 401:
            return reply
        scheme, _, challenge = reply.header("WWW-Authenticate").partition(" ")
        with reply:
            if scheme.lower() not in ("bearer", "basic"):
                raise _error_of(reply)
        credentials = _credentials(urlsplit(url).netloc)
        if scheme.lower() == "basic":
            if not credentials:
                raise _denied(url)
            self._authorizations[key] = f"Basic {credentials}"
        else:
            self._authorizations[key] = f"Bearer {self._token(url, dict(_CHALLENGE.findall(challenge)), credentials)}"
        return super()._send(method, url, {**headers, "Authorization": self._authorizations[key]}, body)

    def _token(self, url: str, challenge: Mapping[str, str], credentials: str) -> str:
        realm = challenge.get("realm", "")
        if urlsplit(realm).scheme != urlsplit(url).scheme and urlsplit(realm).scheme != "https":
            raise InvalidArgumentError(f"{_host_of(url)} names no usable place for tokens: '{realm[:200]}'")
        query = [(name, challenge[name]) for name in ("service", "scope") if name in challenge]
        if not credentials and _host_of(realm) == _host_of(url) and key_path().is_file():
            stamped = sorted([*query, *new_stamp().items()])
            address = f"{realm}{'&' if '?' in realm else '?'}{urlencode(stamped)}"
            with suppress(PermissionDeniedError):  # a registry of another kind, or it does not know this key
                return self._fetch_token(address, signature(address))
        address = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        return self._fetch_token(address, f"Basic {credentials}" if credentials else "")

    def _fetch_token(self, url: str, authorization: str) -> str:
        headers = {"Authorization": authorization} if authorization else {}
        plain = Transport(is_insecure=self._is_insecure, timeout_s=self._timeout_s)  # shows nothing but these
        with plain.open("GET", url, headers) as reply:
            try:
                document = json.loads(reply.read_all())
                return str(document.get("token") or document["access_token"])
            except (ValueError, KeyError, AttributeError):
                raise InternalError(f"{_host_of(url)} answers without a token") from None


def _credentials(host: str) -> str:
    """User and password for a registry in base64, as `docker login` has kept them; empty if there are none."""
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        entry = json.loads(path.read_bytes())["auths"][host]
        return str(entry.get("auth") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _error_of(reply: Reply) -> ServerError:
    host = _host_of(reply.url)
    if reply.status in (401, 403):
        return _denied(reply.url)
    try:
        text = reply.read_all()[:1000].decode(errors="replace").strip()
    except ServerError:
        text = ""
    try:  # the errors of registries
        text = "; ".join(str(each.get("message") or each.get("code")) for each in json.loads(text)["errors"])
    except (ValueError, KeyError, TypeError, AttributeError):
        text = text[:200]
    message = f"{host} answers {reply.status}{': ' + text if text else ''}"
    if reply.status in (404, 410):
        return NotFoundError(message)
    if reply.status >= 500 or reply.status in (408, 429):
        return UnavailableError(message)
    return ServerError(message, code=ErrorCode.INTERNAL)


def _denied(url: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{_host_of(url)} denies access to {urlsplit(url).path[:200]}: it may not exist, or need credentials"
    )


def _host_of(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


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

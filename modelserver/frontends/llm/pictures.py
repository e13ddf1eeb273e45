"""Pictures in conversations: parts of messages until the model is asked, and then elements of its input `image`.

Those that are URLs are fetched from the hosts that the server's options allow."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from modelserver.errors import InvalidArgumentError
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import LanguageModel

# The input of models that see pictures, and what stands for one of them in a text.
IMAGE = "image"
MARK = "<__media__>"


@dataclass(frozen=True, slots=True)
class Picture:
    """What a client gave: the base64 of a file, or a URL. `param` is its path in the request's document."""

    source: str
    param: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether the source is a URL that is to be fetched."""
        return "://" in self.source[:16]


def picture_part(picture: Picture) -> dict[str, Any]:
    """The part of a message's content for a picture."""
    return {"type": "image", IMAGE: picture}


def read_picture(fields: Fields, name: str) -> dict[str, Any]:
    """The part for the picture whose source is the member `name`. Raises ParameterError."""
    fields.need(name, "a data: URL, or the base64 of a picture")
    return picture_part(Picture(fields.text(name) or "", fields.path(name)))


def joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content as templates take it: texts become a line each, and parts only where there are pictures."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == 1 == len(parts):
        return texts[0]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def take_pictures(model: LanguageModel, conversation: Mapping[str, Any]) -> tuple[dict[str, Any], list[Picture]]:
    """The conversation with places for its pictures, and the pictures in their order.

    Raises ParameterError, which names the first picture, for a model that sees none.
    """
    found: list[Picture] = []
    messages = []
    for message in conversation["messages"]:
        content = message["content"]
        if isinstance(content, list):
            found += [part[IMAGE] for part in content if IMAGE in part]
            parts = [{"type": "image"} if IMAGE in part else part for part in content]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    if found and "messages" not in model.inputs:
        raise _sees_none(model, found[0])
    return {**conversation, "messages": messages} if found else dict(conversation), found


def _sees_none(model: LanguageModel, picture: Picture) -> ParameterError:
    return ParameterError(
        f"'{picture.param}': the model '{model.name}' takes text only, and no pictures",
        picture.param,
        Fault.UNSUPPORTED_CONTENT,
    )


async def sources_of(model: LanguageModel, pictures: Sequence[Picture], urls: PictureUrls) -> tuple[str | bytes, ...]:
    """Base64, data: URLs, or files that were fetched.

    Raises ParameterError, which names the picture, for what cannot be, and for a model that sees none.
    """
    if IMAGE not in model.inputs:
        raise _sees_none(model, pictures[0])
    elsewhere = [picture for picture in pictures if picture.is_elsewhere]
    if not elsewhere:
        return tuple(picture.source for picture in pictures)
    try:
        fetched = iter(await urls.fetch([picture.source for picture in elsewhere]))
    except InvalidArgumentError as error:
        param = elsewhere[0].param
        raise ParameterError(f"'{param}': {error.message}", param, Fault.UNSUPPORTED_CONTENT) from None
    return tuple(next(fetched) if picture.is_elsewhere else picture.source for picture in pictures)


# Fetches pictures from other servers, for clients that are not trusted with what this machine can reach.
#
# A host must be among those that the operator has named. It is resolved once, all of its addresses must be public, and
# the connection goes to one of these. Each redirect is checked anew. Whatever goes wrong on the way has one message,
# which tells nothing of addresses, ports and answers.

# For all pictures of a request.
TIME_LIMIT_S = 10.0
MAX_URLS = 16
_MAX_BYTES = 20 << 20
_MAX_REDIRECTS = 3
_MAX_HEAD_BYTES = 16 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
# No blanks and control characters, which would end a line of the request.
_VISIBLE = re.compile(r"[!-~]+")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


class _UnfetchableError(Exception):
    """For whatever reason."""


class PictureUrls:
    """`domains` are the hosts that pictures may come from, by the usual port of http and https, or `host:port`."""

    def __init__(self, domains: Collection[str]) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)

    async def fetch(self, urls: Collection[str]) -> list[bytes]:
        """The files at the URLs. Raises InvalidArgumentError with a message that may be shown to anybody."""
        if len(urls) > MAX_URLS:
            raise InvalidArgumentError(f"a request may name {MAX_URLS} pictures by their URLs, and has {len(urls)}")
        for url in urls:
            if not self._allows(_split(url)):
                raise InvalidArgumentError(
                    "pictures are not fetched from this server: send a data: URL"
                    + (f", or the URL of one of {', '.join(sorted(self._domains))}" if self._domains else "")
                )
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                return [await self._follow(url) for url in urls]
        except (_UnfetchableError, OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError):
            raise InvalidArgumentError("the picture could not be fetched") from None

    async def _follow(self, url: str) -> bytes:
        is_secret = False
        for _ in range(_MAX_REDIRECTS + 1):
            parts = _split(url)
            if parts is None or not self._allows(parts) or (is_secret and parts.scheme != "https"):
                raise _UnfetchableError
            is_secret = parts.scheme == "https"
            location, body = await _get(parts)
            if location is None:
                return body
            url = urljoin(url, location)
        raise _UnfetchableError

    def _allows(self, parts: SplitResult | None) -> bool:
        if parts is None or not parts.hostname:
            return False
        named = f"{parts.hostname}:{_port(parts)}"
        return named in self._domains or (_port(parts) == _PORTS[parts.scheme] and parts.hostname in self._domains)


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, and no way to another that is not."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.sixtofour is not None or found.teredo is not None or found in _TRANSLATED or found.scope_id:
            return False
    return found.is_global and not found.is_multicast


# IPv4 addresses behind a translator.
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


def _split(url: str) -> SplitResult | None:
    """None unless it is a plain URL of http or https."""
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in _PORTS and parts.username is None and parts.password is None
        return parts if is_plain and _VISIBLE.fullmatch(url) and "\\" not in url and _port(parts) else None
    except ValueError:
        return None


def _port(parts: SplitResult) -> int:
    return _PORTS[parts.scheme] if parts.port is None else parts.port


async def _get(parts: SplitResult) -> tuple[str | None, bytes]:
    """Where a redirect leads, or the body."""
    host, port = parts.hostname or "", _port(parts)
    resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)  # SOCK_STREAM
    addresses = [str(entry[4][0]) for entry in resolved]
    if not addresses or not all(map(is_public, addresses)):
        raise _UnfetchableError
    context = await asyncio.to_thread(_tls) if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        addresses[0], port, limit=_MAX_HEAD_BYTES, ssl=context, server_hostname=host if context is not None else None
    )
    try:
        target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        # By HTTP/1.0 the body comes in one piece.
        lines = (f"GET {target} HTTP/1.0", f"Host: {parts.netloc}", "Accept: image/*", "Accept-Encoding: identity")
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
        await writer.drain()
        return await _read_answer(reader)
    finally:
        writer.transport.abort()


@cache
def _tls() -> ssl.SSLContext:
    """Made once, beside the event loop: it reads hundreds of certificates."""
    return ssl.create_default_context()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[str | None, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    matched = _STATUS.match(first)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if matched is None:
        raise _UnfetchableError
    status = int(matched[1])
    if status in _REDIRECTS:
        return headers[b"location"].decode("ascii") if b"location" in headers else "", b""
    if status != 200 or b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)) > _MAX_BYTES:
        raise _UnfetchableError
    body = bytearray()
    while piece := await reader.read(1 << 16):
        body += piece
        if len(body) > _MAX_BYTES:
            raise _UnfetchableError
    if len(body) < int(headers.get(b"content-length", 0)):
        raise _UnfetchableError
    return None, bytes(body)

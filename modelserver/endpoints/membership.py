"""Where the members of a pool come from: a list, a DNS name, a file that is watched, or a stream of documents.

A source that fails leaves the pool as it was, and is asked again; `Membership.problem` and `age_s` say so.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from modelserver.endpoints.endpoint import Endpoint, EndpointState, Member
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.errors import InvalidArgumentError, ServerError, UnavailableError

DNS_INTERVAL_S = 5.0
FILE_INTERVAL_S = 1.0
# After a source failed, and between two looks that failing endpoints ask for.
RETRY_S = 1.0
MAX_RETRY_S = 15.0

# The lines of a document that goes on for as long as it is read: newline-delimited JSON at a URL.
OpenLines = Callable[[str], AsyncIterator[bytes]]


class Source(abc.ABC):
    """Yields the whole membership whenever it may have changed. Raises ServerError, and is then asked again."""

    @abc.abstractmethod
    def members(self, hurry: asyncio.Event) -> AsyncGenerator[Sequence[Member], None]:
        """`hurry` is set when endpoints fail: the next look should come soon. The reader clears it."""


class StaticSource(Source):
    """A list that never changes."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.listed = [Member(address) for address in addresses]

    async def members(self, hurry: asyncio.Event) -> AsyncGenerator[Sequence[Member], None]:
        del hurry
        yield self.listed
        await asyncio.Event().wait()


class DnsSource(Source):
    """All addresses of a name, such as a headless Service's; looked up each 5 s, and when endpoints fail."""

    def __init__(self, host: str, port: int, *, scheme: str = "", interval_s: float = DNS_INTERVAL_S) -> None:
        self._host = host
        self._port = port
        self._prefix = f"{scheme}://" if scheme else ""
        self._interval_s = interval_s

    async def members(self, hurry: asyncio.Event) -> AsyncGenerator[Sequence[Member], None]:
        while True:
            yield [Member(f"{self._prefix}{host}:{self._port}") for host in await self._resolve()]
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._interval_s - RETRY_S)):
                    await hurry.wait()
            hurry.clear()

    async def _resolve(self) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UnavailableError(f"cannot resolve {self._host}: {error}") from None
        hosts = sorted({str(address[0]) for *_, address in found})
        return [f"[{host}]" if ":" in host else host for host in hosts]


class FileSource(Source):
    """A JSON file with `endpoints: [{name, address, port, labels, state}]`; only `address` must be there."""

    def __init__(self, path: Path, *, scheme: str = "", interval_s: float = FILE_INTERVAL_S) -> None:
        self._path = path
        self._scheme = scheme
        self._interval_s = interval_s

    async def members(self, hurry: asyncio.Event) -> AsyncGenerator[Sequence[Member], None]:
        seen: tuple[int, ...] = ()
        while True:
            try:
                status = self._path.stat()
                identity = (status.st_mtime_ns, status.st_size, status.st_ino)
                if identity != seen:
                    yield read_members(self._path.read_bytes(), scheme=self._scheme)
                    seen = identity
            except OSError as error:
                raise UnavailableError(f"cannot read {self._path}: {error.strerror}") from None
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{self._path}: {error.message}") from None
            hurry.clear()
            await asyncio.sleep(self._interval_s)


class StreamSource(Source):
    """Documents as in a file, one a line, each the whole membership, with a `generation` that grows."""

    def __init__(self, url: str, open_lines: OpenLines, *, scheme: str = "") -> None:
        self._url = url
        self._open_lines = open_lines
        self._scheme = scheme

    async def members(self, hurry: asyncio.Event) -> AsyncGenerator[Sequence[Member], None]:
        newest = -1
        async for line in self._open_lines(self._url):
            hurry.clear()
            if not line.strip():
                continue  # keeps the connection alive
            document = _document(line)
            generation = document.get("generation", newest + 1)
            if isinstance(generation, int) and generation > newest:
                newest = generation
                yield _members(document, self._scheme)
        raise UnavailableError(f"{self._url} ended its stream of endpoints")


def parse_source(text: str, *, open_lines: OpenLines, scheme: str = "") -> Source:
    """The source that `dns://NAME:PORT`, `file:PATH` or `http[s]://…` names.

    `scheme` is put before addresses that have none. Raises InvalidArgumentError.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileSource(Path(rest.removeprefix("//")), scheme=scheme)
    if kind == "dns":
        host, _, port = rest.lstrip("/").rpartition(":")
        if host and port.isdigit() and 0 < int(port) < 65536:
            return DnsSource(host.strip("[]"), int(port), scheme=scheme)
        raise InvalidArgumentError(f"expected dns://NAME:PORT, got '{text}'")
    if kind in ("http", "https") and urlsplit(text).hostname:
        return StreamSource(text, open_lines, scheme=scheme)
    raise InvalidArgumentError(f"expected dns://NAME:PORT, file:PATH or http://HOST:PORT/PATH, got '{text}'")


def read_members(content: bytes, *, scheme: str = "") -> list[Member]:
    """The members that a document lists. Raises InvalidArgumentError with the place of what is wrong."""
    return _members(_document(content), scheme)


def _document(content: bytes) -> dict[str, object]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise InvalidArgumentError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError("expected an object with 'endpoints'")
    return document


def _members(document: dict[str, object], scheme: str) -> list[Member]:
    entries = document.get("endpoints")
    if not isinstance(entries, list):
        raise InvalidArgumentError("expected a list 'endpoints'")
    return [_member(entry, f"endpoints[{index}]", scheme) for index, entry in enumerate(entries)]


def _member(entry: object, where: str, scheme: str) -> Member:
    if not isinstance(entry, dict) or not isinstance(entry.get("address"), str) or not entry["address"]:
        raise InvalidArgumentError(f"{where}: expected an object with an 'address'")
    address, port, labels = entry["address"], entry.get("port"), entry.get("labels") or {}
    if "://" not in address:
        if ":" in address and not address.startswith("[") and port is not None:
            address = f"[{address}]"
        address = f"{scheme}://{address}" if scheme else address
        address = address if port is None else f"{address}:{port}"
    if not isinstance(labels, dict):
        raise InvalidArgumentError(f"{where}: expected 'labels' to be an object")
    try:
        state = EndpointState(entry.get("state", "ready"))
    except ValueError:
        raise InvalidArgumentError(f"{where}: unknown state {entry['state']!r}") from None
    texts = {str(name): str(value) for name, value in labels.items()}
    return Member(address, state, str(entry.get("name", "")), texts)


class Membership:
    """Keeps an endpoint set as its source says."""

    def __init__(self, endpoints: EndpointSet, source: Source) -> None:
        self._endpoints = endpoints
        self._source = source
        self._hurry = asyncio.Event()
        self._heard_ns: int | None = None
        # Set after the first membership, or the first failure to get one.
        self.is_known = asyncio.Event()
        self.problem = ""

    @property
    def age_s(self) -> float | None:
        """How long ago the source last answered, while it fails; None while it works."""
        if not self.problem or self._heard_ns is None:
            return None
        return (self._endpoints.clock.now_ns() - self._heard_ns) / 1e9

    async def run(self) -> None:
        """Follow the source until cancelled."""
        self._endpoints.observers.append(self._changed)
        delay_s = RETRY_S
        try:
            while True:
                try:
                    async for members in self._source.members(self._hurry):
                        self._endpoints.update(members)
                        self._heard_ns = self._endpoints.clock.now_ns()
                        self.problem = ""
                        self.is_known.set()
                        delay_s = RETRY_S
                except ServerError as error:
                    self.problem = error.message
                    self.is_known.set()
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
        finally:
            self._endpoints.observers.remove(self._changed)

    def _changed(self, endpoint: Endpoint) -> None:
        """An endpoint in trouble may have moved."""
        if endpoint.is_member and (endpoint.state is EndpointState.DOWN or endpoint.connection_failures):
            self._hurry.set()

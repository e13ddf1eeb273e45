"""Fetches one blob over HTTP: resumed where it stopped, tried again when the connection breaks, checked at the end."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from modelserver.errors import InvalidArgumentError, UnavailableError
from modelserver.store.blobs import Blobs, DigestError, PartialBlob, new_key
from modelserver.store.task import StoreTask
from modelserver.store.transport import Reply, Transport

_CHUNK = 1 << 20
# Seconds before each further attempt when the one before brought nothing.
_PAUSES_S = (0.1, 1.0, 2.0, 4.0, 8.0)
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class RemoteBlob:
    """A file behind an address. `digest` and `size_bytes` are None if they are not known beforehand.

    `state` is a text that changes with the content; without it and without a digest nothing is resumed.
    """

    url: str
    what: str
    digest: str | None = None
    size_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    state: str = ""

    @property
    def can_resume(self) -> bool:
        return bool(self.digest or self.state)

    @property
    def key(self) -> str:
        """The name of its partial file: that of an earlier attempt for the same content."""
        if self.digest is not None:
            return self.digest.replace(":", "-")
        if not self.state:
            return new_key()
        return f"url-{hashlib.sha256(f'{self.url} {self.state} {self.size_bytes}'.encode()).hexdigest()}"


def probe(transport: Transport, url: str, what: str) -> RemoteBlob:
    """The file as the server describes it: its size, and a strong tag by which an interrupted download is resumed."""
    with transport.open("HEAD", url) as reply:
        length, etag = reply.header("Content-Length"), reply.header("ETag")
    size_bytes = int(length) if length.isascii() and length.isdigit() else None
    return RemoteBlob(url, what, size_bytes=size_bytes, state="" if etag.startswith("W/") else etag)


def download(transport: Transport, blobs: Blobs, remote: RemoteBlob, task: StoreTask) -> str:
    """Fetch a blob unless the store has it; returns its digest. Another process that fetches it is waited for.

    Raises DigestError for a wrong content, InvalidArgumentError for one that is longer than it should be,
    StorageFullError, CancelledError, and the server's error when further attempts do not help.
    """

    def report(num_bytes: int) -> None:
        task.report(f"pulling {remote.what}", remote.digest or remote.what, remote.size_bytes or 0, num_bytes)

    if remote.digest is not None and (size_bytes := blobs.size(remote.digest)) is not None:
        report(size_bytes)
        return remote.digest
    with blobs.partial(remote.key, task, report) as partial:
        if remote.digest is not None and (size_bytes := blobs.size(remote.digest)) is not None:
            report(size_bytes)  # another process has fetched it meanwhile
            return remote.digest
        had_bytes = partial.size_bytes
        attempts = _Attempts(transport, partial, remote, report)
        try:
            return attempts.run(task)
        except DigestError:
            if not had_bytes:
                raise
            # The bytes of an earlier attempt were damaged, and are dropped by now.
            return attempts.run(task)


class _Attempts:
    """The attempts to complete one partial blob."""

    def __init__(
        self, transport: Transport, partial: PartialBlob, remote: RemoteBlob, report: Callable[[int], None]
    ) -> None:
        self._transport = transport
        self._partial = partial
        self._remote = remote
        self._report = report

    def run(self, task: StoreTask) -> str:
        partial = self._partial
        num_failures = 0
        while True:
            before = partial.size_bytes
            try:
                self._receive()
                return partial.finish(self._remote.digest, self._remote.what)
            except UnavailableError:
                num_failures = 0 if partial.size_bytes > before else num_failures + 1
                if num_failures > len(_PAUSES_S):
                    raise
                if num_failures:
                    task.wait(_PAUSES_S[num_failures - 1])
                if not self._remote.can_resume:
                    partial.restart()

    def _receive(self) -> None:
        """Append what is missing. Raises UnavailableError when the connection breaks before the end."""
        partial, remote = self._partial, self._remote
        if remote.size_bytes is not None and partial.size_bytes > remote.size_bytes:
            partial.restart()
        if remote.size_bytes == partial.size_bytes:
            self._report(partial.size_bytes)
            return
        ranged = {"Range": f"bytes={partial.size_bytes}-"} if partial.size_bytes else {}
        with self._transport.open("GET", remote.url, {**remote.headers, **ranged}) as reply:
            if ranged and not self._continues(reply):
                partial.restart()
            length = reply.header("Content-Length")
            end = partial.size_bytes + int(length) if length.isdigit() else remote.size_bytes
            if remote.size_bytes is not None and end is not None and end > remote.size_bytes:
                raise self._too_long()
            while chunk := reply.read(_CHUNK):
                if remote.size_bytes is not None and partial.size_bytes + len(chunk) > remote.size_bytes:
                    raise self._too_long()
                needed_bytes = (end or 0) - partial.size_bytes
                partial.append(chunk, remote.what, needed_bytes)
                self._report(partial.size_bytes)
        end = end if remote.size_bytes is None else remote.size_bytes
        if end is not None and partial.size_bytes < end:
            raise UnavailableError(
                f"the connection to {urlsplit(remote.url).netloc} ended at {partial.size_bytes} of {end} bytes of "
                f"{remote.what}"
            )

    def _continues(self, reply: Reply) -> bool:
        """Whether the answer begins where the partial blob ends; servers may ignore ranges."""
        match = _RANGE.match(reply.header("Content-Range")) if reply.status == 206 else None
        return match is not None and int(match[1]) == self._partial.size_bytes

    def _too_long(self) -> InvalidArgumentError:
        self._partial.restart()
        return InvalidArgumentError(
            f"{urlsplit(self._remote.url).netloc} sends more than the {self._remote.size_bytes} bytes that "
            f"{self._remote.what} should have"
        )

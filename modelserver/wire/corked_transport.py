"""A transport that can hold back what is written until the answer is whole: one system call instead of two."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelserver.core.tensor import Buffer

_MAX_JOINED_BYTES = 32 * 1024  # below this one write is cheaper than avoiding a copy


class CorkedTransport:
    """Everything of the transport it stands for; writes within `corked()` go out together when the block ends."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[Buffer] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: Buffer) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    @contextmanager
    def corked(self) -> Iterator[None]:
        """Hold back writes until the block ends. What is held is not yet subject to back-pressure."""
        self._held = []
        try:
            yield
        finally:
            self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, None
        if not held:
            return
        if sum(map(len, held)) <= _MAX_JOINED_BYTES:
            self._transport.write(b"".join(held))
        else:
            self._transport.writelines(held)

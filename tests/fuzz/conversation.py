"""A client that says something to a connection and leaves, and what must hold of the connection then.

Handlers answer whatever is asked; nothing of it needs a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from support.memory_transport import exchange
from support.replaying import ReplayHttp, replay_context

from modelserver.telemetry.wire import Protocol
from modelserver.wire.context import WireContext
from modelserver.wire.limits import WireLimits


def converse(
    kind: Callable[[WireContext], Any],
    protocol: Protocol,
    pieces: Iterable[bytes],
    *,
    http: ReplayHttp | None = None,
    limits: WireLimits | None = None,
) -> bytes:
    """What a connection of `kind` answers to a client that says `pieces`, the first of them at once, and leaves.

    Raises AssertionError if a callback failed, or if something of the connection is left.
    """

    async def run() -> bytes:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        context = replay_context(limits, http)
        transport = await exchange(kind(context), pieces, begins_with=1)
        assert not failures, failures
        assert not context.connections, "a lost connection is still there"
        assert context.counts.connections_open[protocol] == 0
        assert context.counts.open_streams == 0
        assert context.assembly.num_bytes == 0, "memory of requests is still charged"
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"
        return bytes(transport.written)

    return asyncio.run(run())

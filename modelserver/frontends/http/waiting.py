"""Exchanges that wait until a model is loaded on demand, and are then handled as new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelserver.errors import LoadOnDemandError
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import ErrorWriter


class WaitingExchanges:
    """Keeps the Tasks of waiting exchanges. Event loop thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def retry(
        self,
        exchange: HttpExchange,
        unloaded: LoadOnDemandError,
        handle: Callable[[HttpExchange], None],
        errors: ErrorWriter,
    ) -> None:
        """Load the model, then call `handle` again; the wait ends if the client leaves."""
        task = asyncio.get_running_loop().create_task(
            _retry(exchange, unloaded, handle, errors), name="exchange for an unloaded model"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        exchange.on_disconnect = leave


async def _retry(
    exchange: HttpExchange, unloaded: LoadOnDemandError, handle: Callable[[HttpExchange], None], errors: ErrorWriter
) -> None:
    try:
        await unloaded.load()
    except Exception as error:
        exchange.on_disconnect = None
        exchange.respond(errors.failed(error))
    else:
        exchange.on_disconnect = None
        handle(exchange)

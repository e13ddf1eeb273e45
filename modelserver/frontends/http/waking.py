"""Exchanges that wait until a model is loaded on demand, and are then handled as new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelserver.errors import ModelAsleepError
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import ErrorWriter


class WakingExchanges:
    """Keeps the Tasks of waiting exchanges. Event loop thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def retry(
        self,
        exchange: HttpExchange,
        asleep: ModelAsleepError,
        handle: Callable[[HttpExchange], None],
        errors: ErrorWriter,
    ) -> None:
        """Load the model, then call `handle` again; the wait ends if the client leaves."""
        task = asyncio.get_running_loop().create_task(
            _retry(exchange, asleep, handle, errors), name="exchange for a model asleep"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        exchange.on_disconnect = leave


async def _retry(
    exchange: HttpExchange, asleep: ModelAsleepError, handle: Callable[[HttpExchange], None], errors: ErrorWriter
) -> None:
    try:
        await asleep.wake()
    except Exception as error:
        exchange.on_disconnect = None
        exchange.respond(errors.failed(error))
    else:
        exchange.on_disconnect = None
        handle(exchange)

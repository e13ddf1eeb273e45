"""The context that the factory of an installed API gets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from modelserver.api.call import Call, Serve
from modelserver.auth.api_keys import Scope
from modelserver.errors import UnsupportedError
from modelserver.protocol.api import Api, RouteCall
from modelserver.protocol.compression import SUPPORTED
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import ErrorWriter

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The server as an API sees it. Everything is called on the event loop thread.

    `name` is that of the entry point, and must be that of the `Api`. The planes check the models of a caller's key by
    themselves. `limits` bound what a request may ask.
    """

    name: str
    dataplane: AnyDataPlane
    controlplane: AnyControlPlane
    limits: HttpLimits = field(default_factory=HttpLimits)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # kept, because the event loop does not

    def scope(self, word: str) -> Scope:
        """A scope of this API's own: keys have it as `name:word`. `word` is of a-z, 0-9 and -."""
        return Scope(f"{self.name}:{word}")

    def handler(self, serve: Serve, errors: ErrorWriter) -> RouteCall:
        """The handler of a route: `serve` is awaited with a `Call`, in a Task that ends when the client leaves.

        What `serve` raises is answered in the form of `errors`. A call that it leaves unanswered is a fault of ours.
        """
        return partial(self._begin, serve, errors)

    def _begin(self, serve: Serve, errors: ErrorWriter, exchange: HttpExchange, **arguments: str) -> None:
        call = Call(exchange, arguments, self.dataplane, self.limits)
        task = asyncio.get_running_loop().create_task(_run(serve, errors, call), name=f"{self.name}-call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        exchange.on_disconnect = leave


ApiFactory = Callable[[ApiContext], Api]


async def _run(serve: Serve, errors: ErrorWriter, call: Call) -> None:
    try:
        try:
            await serve(call)
            await call.finish()
        except ConnectionError:
            raise
        except Exception as error:
            response = errors.failed(error)
            if isinstance(error, UnsupportedError) and "content-encoding" in call.head.headers:
                response.headers = [*response.headers, ("Accept-Encoding", SUPPORTED)]
            await call.fail(response)
    except ConnectionError:
        logger.debug("the client of %s left", call.head.path)

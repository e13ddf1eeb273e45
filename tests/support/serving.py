"""A whole server in a background thread with its own event loop, on ports the system picks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from support.layouts import ADDRESS, is_routed, layout_options

from modelserver.app.server import Server
from modelserver.options.server_options import ServerOptions

if TYPE_CHECKING:
    from support.routing import RunningRouter

Result = TypeVar("Result")

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


class RunningServer:
    """A started server as a test sees it: its addresses, and a way onto its event loop."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.router: RunningRouter | None = None  # in front of it, whose ports clients get

    @property
    def http_url(self) -> str:
        """`host:port`, as tritonclient takes it."""
        return self.router.http_url if self.router else f"{ADDRESS}:{self.server.http_port}"

    @property
    def grpc_url(self) -> str:
        return self.router.grpc_url if self.router else f"{ADDRESS}:{self.server.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"{ADDRESS}:{self.server.metrics_port}"

    def call(self, function: Callable[[], Result | Awaitable[Result]], timeout_s: float = 30.0) -> Result:
        """Run `function` on the server's loop, awaiting what it returns if need be."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout_s)

    def pass_time(self, seconds: float) -> None:
        """From now on it is so much later for the timers of the server's loop."""
        now_s = self.loop.time
        self.loop.time = lambda: now_s() + seconds  # type: ignore[method-assign]
        self.loop.call_soon_threadsafe(int)


@contextmanager
def running_server(repository: Path | str | Sequence[Path | str], **options: Any) -> Iterator[RunningServer]:
    """Serve `repository` until the block ends. `options` are fields of `ServerOptions`.

    Raises what the server's start raised. Models that failed to load do not stop it unless asked.
    """
    repositories = (repository,) if isinstance(repository, (str, Path)) else tuple(repository)
    defaults: dict[str, Any] = {
        "model_repository": tuple(str(path) for path in repositories),
        "http_address": ADDRESS,
        "grpc_address": ADDRESS,
        "http_port": 0,
        "grpc_port": 0,
        "metrics_port": 0,
        "exit_timeout_secs": 10,
        "exit_on_error": False,
    }
    thread = _ServerThread(ServerOptions(**(defaults | layout_options() | options)))
    with ExitStack() as stack:
        stack.callback(thread.stop)
        running = thread.start()
        if is_routed():
            from support.routing import running_router

            running.router = stack.enter_context(running_router((running.http_url,)))
        yield running


class _ServerThread:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._server: Server | None = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _wait(self, coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def start(self) -> RunningServer:
        self._thread.start()
        self._server = self._wait(self._build(), START_TIMEOUT_S)
        return RunningServer(self._server, self._loop)

    async def _build(self) -> Server:
        server = Server(self._options)
        await server.start()
        return server

    def stop(self) -> None:
        try:
            if self._server is not None:
                self._wait(self._server.stop(), STOP_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
        assert not self._thread.is_alive(), "the server's thread did not end"

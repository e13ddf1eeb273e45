"""One front process over time: started, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from modelserver.errors import InternalError, ServerError
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.recipe import Recipe, RestartOptions, RestartPolicy
from modelserver.wire.processes.setup import FrontSetup, FrontSockets

_logger = logging.getLogger(__name__)

_TARGET: Final = "modelserver.wire.processes.front:create"


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Time limits for a front, and the delays of its restarts.

    A front that sends nothing for `max_silence_s` hangs, and is killed.
    """

    start_timeout_s: float = 60.0
    max_silence_s: float = 30.0
    restart: RestartOptions = field(default_factory=RestartOptions)


class FrontProcess:
    """Keeps one front running, from `start` to `stop`.

    A thread of its own stays with each process from start to end: it logs its output and notices its end. `up` and
    `down` are called on the event loop: `up` with the sockets of a front that serves, which `down` ends.
    """

    def __init__(
        self,
        name: str,
        setup: FrontSetup,
        options: FrontOptions,
        *,
        up: Callable[[FrontProcess, FrontSockets], None],
        down: Callable[[FrontProcess], None],
    ) -> None:
        self.name = name
        self.num_restarts = 0
        self._setup = setup
        self._options = options
        self._policy = RestartPolicy(options.restart)
        self._up = up
        self._down = down
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # Guards the two below; notified when the first becomes true.
        self._changed = threading.Condition()
        self._is_stopping = False
        self._child: ChildProcess | None = None
        self._report = ""  # how the last one ended
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process id of the front that lives now."""
        with self._changed:
            return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the front and wait until it serves. Raises the ServerError that prevented it."""
        self._thread.start()
        await self._started

    def expect_end(self) -> None:
        """Do not start the front again when it ends."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def kill(self) -> None:
        """End the front at once; its stack goes to the log. Unless its end is expected, it is started again."""
        with self._changed:
            if self._child is not None:
                self._child.dump_stack()
                self._child.kill()

    async def stop(self, timeout_s: float) -> bool:
        """Wait for the requested end of the front; kill it after `timeout_s`. Returns whether that was needed."""
        self.expect_end()
        if self._thread.ident is None:  # never started
            return False
        try:
            done, _ = await asyncio.wait({self._ended}, timeout=timeout_s)
        except asyncio.CancelledError:
            self.kill()
            raise
        if not done:
            self.kill()
            await self._ended
        self._thread.join()
        return not done

    # On the supervisor's thread.

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            _logger.exception("%s: its supervisor failed", self.name)
            self._call(self._fail_start, InternalError(f"{self.name} has no supervisor any more: {error!r}"))
        finally:
            self._call(self._ended.set_result, None)

    def _keep_running(self) -> None:
        is_first = True
        while True:
            failure = self._run_child(is_first=is_first)
            with self._changed:
                self._child = None
                if self._is_stopping:
                    return
            if failure is not None and is_first:
                self._call(self._fail_start, failure)
                return
            is_first = False
            pause_s = self._policy.pause_after_crash(time.monotonic())
            _logger.error("%s; its connections are lost, restart in %.2f s", self._report, pause_s)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_stopping, pause_s):
                    return
            self.num_restarts += 1

    def _run_child(self, *, is_first: bool) -> ServerError | None:
        """Start a front and watch it to its end; returns why it could not serve, or None if it did."""
        try:
            sockets, child = self._spawn()
        except OSError as error:
            self._report = f"cannot start a process for {self.name}: {error}"
            return InternalError(self._report)
        with self._changed:
            self._child = child
            if self._is_stopping:
                child.kill()
        failure: ServerError | None = None
        try:
            arguments = {"setup": self._setup.arguments(), "descriptors": list(sockets.descriptors)}
            child.begin(Recipe(_TARGET, arguments).message(is_call=False), self._options.start_timeout_s)
        except ServerError as error:
            failure = error
            child.kill()
            sockets.close()
        else:
            self._call(self._up, self, sockets)
            if is_first:
                self._call(self._finish_start)
        while child.exit_report is None:
            child.watch()
        child.channel.close()
        if failure is None:
            self._call(self._down, self)
        self._report = str(failure) if failure is not None else f"the process of {self.name} {child.exit_report}"
        return failure

    def _spawn(self) -> tuple[FrontSockets, ChildProcess]:
        sockets = FrontSockets(self.name)
        try:
            child = ChildProcess(self.name, {}, sockets.descriptors, has_access_log=True)
        except OSError:
            sockets.close()
            raise
        sockets.close_theirs()
        return sockets, child

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    # On the event loop.

    def _finish_start(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _fail_start(self, error: ServerError) -> None:
        if not self._started.done():
            self._started.set_exception(error)

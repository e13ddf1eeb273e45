"""One child process as seen by the server, from start to end. `supervisor.py` starts the next one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.errors import InternalError
from modelserver.execution.process.channel import Channel, PeerGoneError
from modelserver.execution.process.child_log import DEFAULT_LINES_PER_S, ChildOutput
from modelserver.execution.process.messages import Began, Begin
from modelserver.execution.process.recipe import Recipe
from modelserver.execution.process.shared_buffer import SharedBuffer

_ENTRY = str(Path(__file__).with_name("child_main.py"))
# For every child, unless the server's environment sets them: arrays of megabytes are taken from glibc's heap and given
# back to it, not mapped and faulted in anew for each batch.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a child ended: an exit code or, negative, a signal; and the last lines of its output."""

    status: int
    tail: tuple[str, ...]

    def __str__(self) -> str:
        reason = f"exited with code {self.status}"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                reason = f"was killed by signal {signal.Signals(-self.status).name}"
        return "\n".join([f"{reason}; its last output was:", *self.tail]) if self.tail else f"{reason} without output"


class ChildProcess:
    """A started interpreter that runs `child.py`. One thread watches it (`watch`), another may use `channel`."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        *,
        interpreter: str = "",
        has_access_log: bool = False,
        output_lines_per_s: int = DEFAULT_LINES_PER_S,
    ) -> None:
        """`descriptors` are inherited under their numbers; `interpreter` is a Python other than the server's.

        `has_access_log`: it writes lines of the access log, which a model's code could forge.
        `output_lines_per_s` limits its log output; 0: no limit.

        Raises OSError when no process can be started.
        """
        self.name = name
        self.exit_report: ExitReport | None = None
        self._log = ChildOutput(name, lines_per_s=output_lines_per_s, has_access_log=has_access_log)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outgoing, incoming = SharedBuffer.create(f"{name}:inputs"), SharedBuffer.create(f"{name}:outputs")
        lifeline, self._lifeline = os.pipe()
        self._output, output = os.pipe()
        self.channel = Channel(ours, outgoing, incoming)
        passed = (theirs.fileno(), outgoing.fd, incoming.fd, lifeline)
        try:
            # -P: a model's modules must not be imported from the directory that the server was started in.
            self._process = subprocess.Popen(  # noqa: S603
                [interpreter or sys.executable, "-P", _ENTRY, name, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(*passed, *descriptors),
                start_new_session=True,
                env={**_ENVIRONMENT, **os.environ, **environment},
            )
        except BaseException:
            self.channel.close()
            os.close(self._lifeline)
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
            os.close(output)
        self.pid = self._process.pid
        self._pidfd_lock = threading.Lock()  # guards the descriptor: `watch` closes it, others signal through it
        self._pidfd = os.pidfd_open(self.pid)
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._poll.register(self._pidfd, select.POLLIN)

    @property
    def num_begun(self) -> int:
        """The number of the last batch that the child has begun to execute; 0 before the first."""
        return self.channel.read_mark()

    def begin(self, message: Begin, timeout_s: float) -> Began:
        """Tell the new child what to build, and wait for it while logging its output. Raises ServerError on failure."""
        try:
            self.channel.send(message)
            if self.watch(until_message=True, timeout_s=timeout_s):
                began, _ = self.channel.receive()
                assert isinstance(began, Began), f"expected Began, got {began!r}"
                if began.error is not None:
                    raise began.error.error()
                return began
        except PeerGoneError:
            while self.exit_report is None:
                self.watch()
        if self.exit_report is not None:
            raise InternalError(f"the process of {self.name} {self.exit_report}")
        self.dump_stack()
        self.watch(timeout_s=0.2)  # the stack goes to the log
        raise InternalError(f"{self.name} did not start within {timeout_s} s; its stack is in the log")

    def watch(self, *, until_message: bool = False, timeout_s: float | None = None) -> bool:
        """Log the child's output until it ends; then set `exit_report`, and free everything but memory.

        With `until_message` return True as soon as a message, or the channel's end, can be received. False after
        `timeout_s`, or at the end of the child.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        connection = self.channel.fileno()
        if until_message:
            self._poll.register(connection, select.POLLIN)
        try:
            while True:
                wait_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
                ready = {fd for fd, _event in self._poll.poll(wait_ms)}
                if self._output in ready:
                    self._read_output()
                # Checked before the child's end: it may send a last message and exit at once.
                if until_message and connection in ready:
                    return True
                if self._pidfd in ready:
                    break
                if not ready or (deadline_s is not None and time.monotonic() >= deadline_s):
                    return False
        finally:
            if until_message:
                self._poll.unregister(connection)
        self._reap()
        return False

    def dump_stack(self) -> None:
        """Let the child write its Python stacks to the log."""
        self._signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Kill the child and everything that it started; `watch` sees the end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # The pidfd refers to this very process, even after its pid was given to another.
        with self._pidfd_lock, contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        # The child is still a zombie here, so its process group's number cannot belong to another.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        while self._read_output():
            continue
        self._log.finish()
        self.exit_report = ExitReport(status, self._log.tail())
        self.channel.shutdown()  # wakes the thread that waits for an answer, even if a grandchild holds the other end
        os.close(self._lifeline)
        os.close(self._output)
        with self._pidfd_lock:
            os.close(self._pidfd)
            self._pidfd = -1

    def _read_output(self) -> bool:
        """Log available output; False if there is none now."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        if not data:  # the child closed its output; that alone means nothing
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._output)
            return False
        self._log.feed(data)
        return True


def call_in_process(
    name: str, recipe: Recipe, *, timeout_s: float, environment: Mapping[str, str], interpreter: str = ""
) -> Any:
    """Call the recipe's function in a child process of its own, and return its result.

    Blocks. Raises the ServerError that the function raised, or InternalError if the process dies or takes too long.
    """
    try:
        child = ChildProcess(name, environment, interpreter=interpreter)
    except OSError as error:
        raise InternalError(f"cannot start a process for {name}: {error}") from error
    try:
        return child.begin(recipe.message(is_call=True), timeout_s).result
    finally:
        child.kill()
        while child.exit_report is None:
            child.watch()
        child.channel.close()

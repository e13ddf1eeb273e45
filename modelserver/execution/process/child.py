"""The main program of a child process: builds one instance, and executes the batches that the server sends.

Started as `child_main.py NAME SOCKET INCOMING OUTGOING LIFELINE` by `child_process.py`; the last four are
descriptors.
"""

from __future__ import annotations

import abc
import faulthandler
import fcntl
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from modelserver.backend import (
    BatchInstance,
    InternalError,
    ServerError,
)
from modelserver.core.interpreter import shorten_switch_interval
from modelserver.execution.process import calls_to_server
from modelserver.execution.process.channel import Channel, PeerGoneError, Received
from modelserver.execution.process.child_log import describe_exception
from modelserver.execution.process.hosted_request import hosted_request
from modelserver.execution.process.messages import (
    AskReady,
    Began,
    Begin,
    ErrorRecord,
    Execute,
    Executed,
    Finish,
    Readiness,
    RequestRecord,
    ResponseRecord,
    SequenceEnded,
    Trim,
)
from modelserver.execution.process.packing import Payload, response_record
from modelserver.execution.process.server_connection import ServerConnection
from modelserver.execution.process.shared_buffer import ByteView, SharedBuffer
from modelserver.execution.process.step_host import StepHost, leave
from modelserver.platform.device_loss import device_loss, note_device_error


class ProcessMain(abc.ABC):
    """Takes over the child process after its start was reported to the server."""

    @abc.abstractmethod
    def run(self) -> int:
        """Serve until the end of the process; its exit status."""


# Executed batches are answered together for at most this time, because a process that dies loses their answers.
_FLUSH_NS = 150_000


class Host:
    """Runs on the main thread of the child; other threads may use the connection as well."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._connection = ServerConnection(channel)
        # A model may fork. The copy also returns from `execute`, and must neither answer nor take the next batch.
        os.register_at_fork(after_in_child=self._connection.disown)

    def run(self) -> int:
        """Serve until the server ends it; the exit status."""
        begin, _ = self._connection.next_message()
        assert isinstance(begin, Begin), f"the first message must be Begin, got {begin!r}"
        # The number of the batch in progress, which the server reads if this process dies.
        self._channel.keep_mark()
        try:
            sys.path[:0] = begin.python_path
            calls_to_server.connection = self._connection
            self._connection.stay_awake(begin.busy_wait_us)
            result = _resolve(begin.target)(**begin.arguments)
        except Exception as error:
            traceback.print_exc()
            self._connection.send(Began(error=_error_record(error)))
            return 1
        if begin.is_call:
            self._connection.send(Began(result=result))
            return 0
        if isinstance(result, ProcessMain):
            self._connection.send(Began())
            return result.run()
        assert isinstance(result, BatchInstance), f"{begin.target} must return a BatchInstance, got {result!r}"
        self._connection.send(
            Began(
                has_readiness=type(result).is_ready is not BatchInstance.is_ready,
                answers_later=result.answers_later,
                is_stepped=isinstance(result, StepHost),
            )
        )
        self._serve(result)
        return 0

    def _serve(self, instance: BatchInstance) -> None:
        while True:
            received = [self._connection.next_message()]
            message = received[0][0]
            if isinstance(message, Execute):
                del message
                self._execute(instance, received)
                if device_loss():
                    leave(f"it has lost its GPU: {device_loss()}")
            elif isinstance(message, AskReady):
                self._connection.send(Readiness(number=message.number, is_ready=_is_ready(instance)))
            elif isinstance(message, SequenceEnded):
                _end_sequence(instance, message)
            elif isinstance(message, Trim):
                while self._channel.trim_arena():
                    pass
            elif isinstance(message, Finish):
                instance.close()
                return
            else:
                raise AssertionError(f"unexpected message {message!r}")

    def _execute(self, instance: BatchInstance, received: list[Received]) -> None:
        """Execute the batches of one message, which is taken out of `received`."""
        message, payload = received.pop()
        assert isinstance(message, Execute), "the caller has looked"
        requests = message.requests
        number, sizes = message.number, message.sizes
        num_further = len(sizes)
        first = 0
        content = Payload()
        answer = Executed(number=number)
        began_ns = started_ns = time.monotonic_ns()
        for size in sizes:
            self._channel.set_mark(number)
            number += 1
            num_further -= 1
            batch = requests if size == len(requests) else requests[first : first + size]
            first += size
            if not num_further:
                # The last answer returns the leases of the batches, so nothing may hold them any more.
                numbers = range(requests[0].number, requests[-1].number + 1)
                message.requests = requests = []
            responses, error = self._execute_batch(instance, batch, payload, content)
            now_ns = time.monotonic_ns()
            answer.responses += responses
            answer.errors.append(error)
            answer.durations_ns.append(now_ns - started_ns)
            started_ns = now_ns
            del batch, responses, error
            if not num_further:
                del payload
                self._connection.close_requests(numbers)
                self._connection.send(answer, content)
            elif now_ns - began_ns > _FLUSH_NS:
                self._connection.send(answer, content)
                content, answer = Payload(), Executed(number=number)
                began_ns = now_ns

    def _execute_batch(
        self, instance: BatchInstance, records: list[RequestRecord], payload: bytearray | ByteView, content: Payload
    ) -> tuple[list[ResponseRecord | None], ErrorRecord | None]:
        try:
            requests = [hosted_request(self._connection, record, payload) for record in records]
            responses = instance.execute(requests)
            if responses is None:
                responses = [None] * len(requests)
            answered = [None if response is None else response_record(response, content) for response in responses]
            if len(answered) != len(requests):
                raise InternalError(f"{len(answered)} responses for {len(requests)} requests")
            if None in answered:
                for request, record in zip(requests, answered, strict=True):
                    if record is None and not request.has_taken_sender:
                        # The model may still hold the request and answer later; if it drops the request, that fails.
                        request.take_sender()
        except Exception as error:
            if not isinstance(error, ServerError):
                traceback.print_exc()
                note_device_error(error)
            return [], _error_record(error)
        return answered, None


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    assert callable(function), f"{target} cannot be called"
    return function  # type: ignore[no-any-return]


def _end_sequence(instance: BatchInstance, message: SequenceEnded) -> None:
    try:
        instance.on_sequence_end(message.correlation_id, message.reason)
    except (Exception, SystemExit):
        traceback.print_exc()


def _is_ready(instance: BatchInstance) -> bool:
    try:
        return instance.is_ready()
    except (Exception, SystemExit):
        traceback.print_exc()
        return False


def _error_record(error: Exception) -> ErrorRecord:
    if isinstance(error, ServerError):
        return ErrorRecord.of(error)
    return ErrorRecord.of(InternalError(describe_exception(error)))


def _die_with_server(lifeline: int) -> None:
    """Let the kernel kill this process group when the server's end of the pipe `lifeline` closes.

    Unlike PR_SET_PDEATHSIG this does not depend on the *thread* that started the child, also kills the programs that
    the model started, and needs neither a thread here nor the cooperation of code that holds the GIL.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline, 1)
    except BlockingIOError:
        return
    os._exit(1)  # closed before the kernel was told to watch


_SERVER_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What is blocked across a fork: everything but faults of the code itself, which must show the stack.
_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
_HELD_SIGNALS: Final = signal.valid_signals() - _FAULTS


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    pass


def _leave_signals_to_server() -> None:
    """Ignore Ctrl-C, a closing terminal and a service manager's SIGTERM: they are for the server, which drains and then
    ends this process.

    This uses a handler, because programs that the model starts would inherit SIG_IGN.
    """
    for number in _SERVER_SIGNALS:
        # Under nohup a signal stays ignored, also for programs that the model starts.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ignore_signal)
    _let_copies_end()
    # A crash, or SIGUSR2 before a kill, shows the Python stack in the log and in the error of the requests.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def _let_copies_end() -> None:
    """Let these signals end a forked copy, from its first moment on.

    Python drops signals that reach a copy before its interpreter is set up, and our handler would miss those that
    arrive just before a blocking call: a pool that ends its workers would then wait for them for ever. So the signals
    are blocked across the fork, and get their default action before they are unblocked.

    All signals are blocked, so that no handler of the model runs inside these hooks: one that raises there would leave
    signals blocked, or without their default action, in the model's process or in its copy.
    """
    forks = threading.local()  # several threads may be about to fork

    def block() -> None:
        forks.mask = _change_mask(signal.SIG_BLOCK, set())
        _change_mask(signal.SIG_BLOCK, _HELD_SIGNALS)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forks.mask)

    def restore_in_copy() -> None:
        for number in _SERVER_SIGNALS:
            if signal.getsignal(number) is _ignore_signal:  # the model may have set its own
                signal.signal(number, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore_in_copy)


def _change_mask(how: int, numbers: set[signal.Signals]) -> set[int]:
    """As pthread_sigmask, but exceptions of handlers, which it runs for pending signals, are printed."""
    while True:
        try:
            return signal.pthread_sigmask(how, numbers)
        except BaseException:
            traceback.print_exc()


def main() -> int:
    socket_fd, incoming, outgoing, lifeline = (int(text) for text in sys.argv[2:6])
    # As in Triton's stub, so that modules which parse the command line on import find no arguments.
    sys.argv[:] = [""]
    _die_with_server(lifeline)
    _leave_signals_to_server()
    shorten_switch_interval()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    channel = Channel(socket.socket(fileno=socket_fd), SharedBuffer(outgoing), SharedBuffer(incoming))
    try:
        return Host(channel).run()
    except PeerGoneError:
        os._exit(1)

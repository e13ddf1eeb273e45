"""What runs in a child process: builds one instance and executes the batches that the server sends.

Started as `child_main.py NAME SOCKET INCOMING OUTGOING LIFELINE` by `child_process.py`; the last four are
descriptors.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from modelserver.backend import BatchInstance, InferRequest, InternalError, ServerError
from modelserver.execution.channel import Channel, PeerGoneError
from modelserver.execution.exception_text import describe_exception
from modelserver.execution.messages import (
    Answer,
    AskReady,
    Began,
    Begin,
    ErrorRecord,
    Execute,
    Executed,
    Finish,
    Query,
    Readiness,
    RequestRecord,
    ResponseRecord,
    Trim,
)
from modelserver.execution.packing import Payload, unpack
from modelserver.execution.records import response_record
from modelserver.execution.resident import Resident
from modelserver.execution.shared_buffer import ByteView, SharedBuffer


class HostedRequest(InferRequest):
    """A request in a child process; whether it is cancelled is asked of the server, where the caller is known."""

    __slots__ = ("_ask",)
    _ask: Callable[[], bool] | None

    @property
    def is_cancelled(self) -> bool:
        return self._ask is not None and self._ask()

    @is_cancelled.setter
    def is_cancelled(self, _value: bool) -> None:
        # The dataclass's __init__ sets the default; the answer stays with the server.
        self._ask = None

    def ask_cancelled_with(self, ask: Callable[[], bool] | None) -> None:
        self._ask = ask


class Host:
    """The child's side of the conversation. The main thread runs it; other threads may only ask (`_ask`)."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Held while the channel is used during a batch: the model may ask from threads of its own.
        self._asking = threading.Lock()
        self._batch_number = 0

    def run(self) -> int:
        """Serve until the server says so; the exit status."""
        begin, _ = self._channel.receive()
        assert isinstance(begin, Begin), f"the first message must be Begin, got {begin!r}"
        try:
            sys.path[:0] = begin.python_path
            result = _resolve(begin.target)(**begin.arguments)
        except Exception as error:
            traceback.print_exc()
            self._channel.send(Began(error=_error_record(error)))
            return 1
        if begin.is_call:
            self._channel.send(Began(result=result))
            return 0
        if isinstance(result, Resident):
            self._channel.send(Began())
            return result.run()
        assert isinstance(result, BatchInstance), f"{begin.target} must return a BatchInstance, got {result!r}"
        self._channel.send(Began(has_readiness=type(result).is_ready is not BatchInstance.is_ready))
        self._serve(result)
        return 0

    def _serve(self, instance: BatchInstance) -> None:
        while True:
            message, payload = self._channel.receive()
            if isinstance(message, Execute):
                answer, content = self._execute(instance, message, payload)
                # Nothing of the batch may keep its lease while the answer says what was released.
                del message, payload
                self._channel.send(answer, content)
                del answer, content
            elif isinstance(message, AskReady):
                self._channel.send(Readiness(number=message.number, is_ready=_is_ready(instance)))
            elif isinstance(message, Trim):
                self._channel.arena.trim()
            elif isinstance(message, Finish):
                instance.close()
                return
            else:
                raise AssertionError(f"unexpected message {message!r}")

    def _execute(
        self, instance: BatchInstance, message: Execute, payload: bytearray | ByteView
    ) -> tuple[Executed, Payload]:
        content = Payload()
        answer = Executed()
        try:
            first = 0
            for size in message.sizes:
                records = message.requests[first : first + size]
                responses, error = self._execute_batch(instance, first, records, payload, content)
                answer.responses += responses
                answer.errors.append(error)
                first += size
        finally:
            with self._asking:
                self._batch_number += 1
        return answer, content

    def _execute_batch(
        self,
        instance: BatchInstance,
        first: int,
        records: list[RequestRecord],
        payload: bytearray | ByteView,
        content: Payload,
    ) -> tuple[list[ResponseRecord], ErrorRecord | None]:
        """One batch, whose first request has the index `first` among all of the message."""
        try:
            requests = [self._request(first + index, record, payload) for index, record in enumerate(records)]
            responses = instance.execute(requests) or ()
            answered = [response_record(response, content) for response in responses if response is not None]
            if len(answered) != len(requests):
                raise InternalError(f"{len(answered)} responses for {len(requests)} requests")
        except Exception as error:
            if not isinstance(error, ServerError):
                traceback.print_exc()
            return [], _error_record(error)
        return answered, None

    def _request(self, index: int, record: RequestRecord, payload: bytearray | ByteView) -> HostedRequest:
        request = HostedRequest(
            model_name=record.model_name,
            version=record.version,
            inputs={tensor.name: unpack(tensor, payload) for tensor in record.inputs},
            id=record.id,
            outputs=record.outputs,
            parameters=record.parameters,
            priority=record.priority,
            timeout_us=record.timeout_us,
            deadline_ns=record.deadline_ns,
            sequence_id=record.sequence_id,
            sequence_start=record.sequence_start,
            sequence_end=record.sequence_end,
            rows=record.rows,
        )
        request.ask_cancelled_with(partial(self._ask, self._batch_number, "is_cancelled", index))
        return request

    def _ask(self, batch_number: int, topic: str, argument: Any) -> Any:
        """The server's answer to a question about a batch; None when the batch has already been answered."""
        with self._asking:
            if batch_number != self._batch_number:
                return None
            self._channel.send(Query(topic=topic, argument=argument))
            answer, _ = self._channel.receive()
            assert isinstance(answer, Answer), f"expected an Answer, got {answer!r}"
            return answer.value


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    assert callable(function), f"{target} cannot be called"
    return function  # type: ignore[no-any-return]


def _is_ready(instance: BatchInstance) -> bool:
    try:
        return instance.is_ready()
    except Exception:
        traceback.print_exc()
        return False


def _error_record(error: Exception) -> ErrorRecord:
    if isinstance(error, ServerError):
        return ErrorRecord.of(error)
    return ErrorRecord.of(InternalError(describe_exception(error)))


def _die_with_server(lifeline: int) -> None:
    """Let the kernel kill this process group when the server's end of the pipe `lifeline` closes.

    Unlike PR_SET_PDEATHSIG this does not depend on the *thread* that started the child, takes what the model
    started along, and needs no thread here and no cooperation of code that holds the GIL.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline, 1)
    except BlockingIOError:
        return
    os._exit(1)  # closed before the kernel was told to watch


def _leave_signals_to_server() -> None:
    """Ctrl-C and a service manager's SIGTERM to the whole group are for the server: it drains, then tells us.

    A handler and not SIG_IGN, which programs that the model starts would inherit; a forked copy dies as usual.
    """
    host = os.getpid()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != host:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    # A crash, or SIGUSR2 before a kill, shows the Python stack in the log and in the error of the requests.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def main() -> int:
    connection, incoming, outgoing, lifeline = (int(text) for text in sys.argv[2:6])
    _die_with_server(lifeline)
    _leave_signals_to_server()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    channel = Channel(socket.socket(fileno=connection), SharedBuffer(outgoing), SharedBuffer(incoming))
    try:
        return Host(channel).run()
    except PeerGoneError:
        os._exit(1)

"""A `StepInstance` in a child process: a thread of the child drives it, while the main thread listens to the server.

As in the server (`workers.py: StepThread`, `step_runner.py`), with the child's connection in place of the dispatcher
and the queue. Requests are accepted between steps, the responses of one step travel in one message, and cancels take
effect before the next step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from functools import partial

from modelserver.backend import Backend, BatchInstance, InternalError, ServerError, StepInstance
from modelserver.core.request import InferRequest, InFlightRequest
from modelserver.errors import CancelledError
from modelserver.execution.process.channel import PeerGoneError
from modelserver.execution.process.hosted_request import HostedRequest
from modelserver.execution.process.messages import Measured, MeasurementRecord
from modelserver.execution.process.server_connection import ServerConnection
from modelserver.platform.device_loss import device_loss, note_device_error
from modelserver.telemetry.measurement import with_queue

# How long the instance may accept requests before its next step.
_TAKE_BUDGET_NS = 5_000_000
# At most this many requests wait here to be accepted; further ones wait in the model's queue.
_MAX_UNTAKEN = 16
# How often measurements are sent to the server while there is work.
_MEASURE_NS = 250_000_000
# After this many failed steps in a row the process exits and is started again, because a device may be broken.
_MAX_FAILURES = 3
# Exit status of a process whose instance is out of order.
_EXIT_STATUS = 70


class StepHost(BatchInstance):
    """Takes requests from the main thread (`execute`), which waits while too many are not yet accepted."""

    answers_later = True

    def __init__(self, backend: Backend, instance: StepInstance, connection: ServerConnection) -> None:
        self._backend = backend
        self._instance = instance
        self._connection = connection
        self._name = backend.context.model_name
        # New and cancelled requests: one thread appends, the other takes them out.
        self._arrived: deque[HostedRequest] = deque()
        self._cancelled: deque[HostedRequest] = deque()
        # Only for the stepping thread: requests that wait for room, and accepted ones that have not ended.
        self._waiting: deque[HostedRequest] = deque()
        self._open: dict[int, HostedRequest] = {}
        self._num_failures = 0
        self._measured_ns = 0
        self._is_closing = False
        self._signal = threading.Event()
        self._has_taken = threading.Event()
        # A main thread that polls for messages would take the interpreter from the steps.
        connection.stay_awake(0)
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            assert isinstance(request, HostedRequest), "this runs in a child process"
            request.sender.watch(on_cancel=partial(self._on_cancel, request))
            self._arrived.append(request)
        self._signal.set()
        while self._num_untaken >= _MAX_UNTAKEN and not self._is_closing:
            self._has_taken.clear()
            if self._num_untaken >= _MAX_UNTAKEN:
                self._has_taken.wait(0.1)

    def close(self) -> None:
        self._is_closing = True
        self._signal.set()
        self._thread.join()
        self._instance.close()
        self._backend.unload()

    @property
    def _num_untaken(self) -> int:
        return len(self._arrived) + len(self._waiting)

    def _on_cancel(self, request: HostedRequest) -> None:
        self._cancelled.append(request)
        self._signal.set()

    def _work(self) -> None:
        try:
            while self._take_turn():
                pass
        except PeerGoneError:
            return  # the server is gone, and the kernel will end this process
        except BaseException:
            traceback.print_exc()
            leave("the thread of its steps has failed")

    def _take_turn(self) -> bool:
        """Accept requests, handle cancels, and run one step; False to end the thread."""
        self._signal.clear()
        self._connection.poll()  # for cancels, while the main thread waits in `execute`
        self._connection.hold()
        self._take()
        self._abort_cancelled()
        self._send()
        if self._is_closing:
            return False
        if self._instance.has_work:
            self._connection.hold()
            self._step()
            if not self._instance.has_work or time.monotonic_ns() - self._measured_ns > _MEASURE_NS:
                self._measure()  # before the last responses, so that clients that have these find them counted
            self._send()
            return True
        self._measure()
        if not self._num_untaken:
            self._signal.wait()
        return True

    def _send(self) -> None:
        """Send the kept responses, and forget the requests that ended with them."""
        for number in self._connection.release():
            self._open.pop(number, None)

    def _take(self) -> None:
        """Give the instance new requests, within the budget."""
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        ends_ns = time.monotonic_ns() + _TAKE_BUDGET_NS
        while self._waiting and self._instance.has_room and time.monotonic_ns() < ends_ns:
            request = self._waiting.popleft()
            if request.sender.is_cancelled:
                self._end(request, self._cancel())
                continue
            self._open[request.number] = request
            refusal = self._add(request)
            if refusal is not None:
                self._end(request, refusal)
        self._has_taken.set()

    def _add(self, request: InFlightRequest) -> ServerError | None:
        try:
            self._instance.add(request)
        except ServerError as error:
            return error
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return InternalError(f"instance of '{self._name}' failed: {type(error).__name__}: {error}")
        return None

    def _abort_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request in self._waiting:
                self._waiting.remove(request)
            elif request.number in self._open:
                self._abort(request)
            self._end(request, self._cancel())

    def _cancel(self) -> CancelledError:
        return CancelledError(f"request to model '{self._name}' was cancelled")

    def _step(self) -> None:
        try:
            self._instance.step()
            self._num_failures = 0
        except ServerError as error:
            self._fail_all(error)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            note_device_error(error)
            self._fail_all(InternalError(f"instance of '{self._name}' failed: {type(error).__name__}: {error}"))

    def _fail_all(self, error: ServerError) -> None:
        """End every request with this error. If the instance keeps failing, end the process."""
        for request in list(self._open.values()):
            self._abort(request)
            self._end(request, error)
        self._num_failures += 1
        if self._instance.has_work or self._num_failures >= _MAX_FAILURES or device_loss():
            self._send()
            leave(f"its steps fail: {error.message}")

    def _abort(self, request: HostedRequest) -> None:
        try:
            self._instance.abort(request)
        except (Exception, SystemExit):
            traceback.print_exc()
            self._send()
            leave("it failed to abort a request")

    def _end(self, request: HostedRequest, error: ServerError) -> None:
        with contextlib.suppress(InternalError):  # the request has already ended
            request.sender.finish(error)

    def _measure(self) -> None:
        self._measured_ns = time.monotonic_ns()
        # Requests that wait here are in neither the server's queue nor the instance.
        measured = with_queue(self._instance.measure(), self._num_untaken)
        records = [MeasurementRecord.of(measurement) for measurement in measured]
        self._connection.send(Measured(measurements=records))


def leave(reason: str) -> None:
    """End this process, so that the server starts another one."""
    sys.stderr.write(f"the instance is out of order, and its process ends: {reason}\n")
    sys.stderr.flush()
    os._exit(_EXIT_STATUS)

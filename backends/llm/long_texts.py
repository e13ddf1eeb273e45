"""Requests with long texts, which are tokenised beside the worker's thread, so that others do not wait."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event

from modelserver.backend import CancelledError, InferRequest, InferResponse, InternalError, ResponseSender, ServerError

from .call import ReadRequest
from .contract import IMAGE, PREDICTION
from .text.tokenizer import LONG_TEXT, LengthCheck

logger = logging.getLogger(__name__)

# How long an instance that has nothing else to do waits for a text, before it looks for other requests again.
_IDLE_S = 0.01
# More at once would only want the cores that the model and the event loop compute on.
_NUM_THREADS = max(1, min(2, len(os.sched_getaffinity(0)) // 2)) if hasattr(os, "sched_getaffinity") else 1


@dataclass(frozen=True, slots=True)
class _Reading:
    sender: ResponseSender
    future: Future[ReadRequest]
    is_left: Event


class LongTexts:
    """Called from the worker's thread. The threads that read begin with the first long text and end with `close`.

    At most `most`: then it has no room, and further requests wait in the queue.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="llm-text")
        self._readings: dict[InferRequest, _Reading] = {}

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def has_room(self) -> bool:
        return len(self._readings) < self._most

    def add(self, request: InferRequest, read: Callable[[InferRequest, LengthCheck], ReadRequest]) -> bool:
        """Whether the request has a long text. Then `take` gives back what `read` makes of it, on another thread.

        `read` asks its second argument between the parts of a text: it raises CancelledError once the client has left.
        """
        if not _is_long(request):
            return False
        is_left = Event()

        def check_left(_num_tokens: int, _is_all: bool) -> None:
            if is_left.is_set():
                raise CancelledError("the client has left")

        self._readings[request] = _Reading(request.sender, self._threads.submit(read, request, check_left), is_left)
        return True

    def take(self, begin: Callable[[InferRequest, ResponseSender, ReadRequest], None], *, is_idle: bool) -> None:
        """Let those begin that have been read, or answer them with what is wrong. `is_idle`: wait a little for one."""
        if is_idle:
            wait([reading.future for reading in self._readings.values()], _IDLE_S, FIRST_COMPLETED)
        for request in [request for request, reading in self._readings.items() if reading.future.done()]:
            reading = self._readings.pop(request)
            try:
                begin(request, reading.sender, reading.future.result())
            except ServerError as error:
                reading.sender.finish(InferResponse(error=error))
            except Exception as error:
                logger.exception("reading a long text failed")
                failure = InternalError(f"reading the text failed: {type(error).__name__}: {error}")
                reading.sender.finish(InferResponse(error=failure))

    def discard(self, request: InferRequest) -> bool:
        """Forget a request; False if it is not here."""
        reading = self._readings.pop(request, None)
        if reading is None:
            return False
        reading.future.cancel()
        reading.is_left.set()
        return True

    def close(self) -> None:
        """End the threads, after the parts of texts that they are at."""
        for reading in self._readings.values():
            reading.is_left.set()
        self._readings.clear()
        self._threads.shutdown(cancel_futures=True)


def _is_long(request: InferRequest) -> bool:
    """Pictures take as long to read as long texts."""
    return IMAGE in request.inputs or any(
        len(tensor.data.item()) > LONG_TEXT
        for name in ("text_input", "messages", "text_pair", PREDICTION)
        if (tensor := request.inputs.get(name)) is not None
    )

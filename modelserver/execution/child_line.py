"""The child's end of one request that its model answers by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from modelserver.backend import InferResponse, InternalError, ServerError
from modelserver.execution.child_exchange import Exchange
from modelserver.execution.messages import Sent
from modelserver.execution.packing import Payload
from modelserver.execution.records import response_record


class ChildLine:
    """What a `ResponseSender` in a child process speaks into. `_lock` keeps the responses of a request in order."""

    __slots__ = ("_exchange", "_is_closed", "_is_decoupled", "_is_ended", "_lock", "_num_sent", "_number")

    def __init__(self, exchange: Exchange, number: int, *, is_decoupled: bool) -> None:
        self._exchange = exchange
        self._number = number
        self._is_decoupled = is_decoupled
        self._lock = threading.Lock()
        self._num_sent = 0
        self._is_ended = False
        self._is_closed = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_ended or self._exchange.is_cancelled(self._number)

    @property
    def has_room(self) -> bool:
        return self._is_ended or self._exchange.has_room(self._number)

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        if not self._is_ended:
            self._exchange.watch(self._number, on_cancel=on_cancel, on_room=on_room)

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:
        if wait:
            self._exchange.wait_for_room(self._number)
        with self._lock:
            self._check(response, is_final=is_final)
            if self._is_ended:  # by the one response of a model that is not decoupled
                self._is_closed = True
                return
            self._put(response, is_ended=is_final or not self._is_decoupled)
            self._num_sent += response is not None
            self._is_closed = is_final
            self._is_ended = is_final or not self._is_decoupled
        if self._is_ended:
            self._exchange.close_line(self._number)

    def _put(self, response: InferResponse | ServerError | None, *, is_ended: bool) -> None:
        basket = self._exchange.basket
        if basket is not None:
            basket.add(self._number, response, is_final=is_ended)
            return
        payload = Payload()
        record = None if response is None else response_record(response, payload)
        self._exchange.send(Sent(number=self._number, response=record, is_final=is_ended), payload)

    def note(self, event: str, time_ns: int) -> None:
        basket = self._exchange.basket
        if basket is not None:
            basket.message.notes.append((self._number, event, time_ns))

    def drop(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._exchange.post(Sent(number=self._number, is_final=True, is_dropped=True))

    def _check(self, response: InferResponse | ServerError | None, *, is_final: bool) -> None:
        if self._is_closed:
            raise InternalError("Unable to send response. Response sender has been closed.")
        if self._is_decoupled:
            return
        if response is not None and self._num_sent:
            raise InternalError("Unable to send response. Non-decoupled model cannot send more than one response.")
        if response is None and is_final and not self._num_sent:
            raise InternalError(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )

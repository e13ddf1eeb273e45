"""A model's end of a request that it answers many times, or after `execute` has returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, ServerError


class ResponseTarget(Protocol):
    """The server's end of one request, which a `ResponseSender` calls. Called from any thread."""

    __slots__ = ()

    @property
    def is_cancelled(self) -> bool: ...

    @property
    def has_room(self) -> bool: ...

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:
        """Send a response. Raises InternalError after the final one, and for one that the model must not send."""

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        """Replace the callbacks; None leaves one as it is."""

    def note(self, event: str, time_ns: int) -> None:
        """For the request's trace, if it has one."""

    def drop(self) -> None:
        """The sender is gone. Called by the garbage collector: takes no lock and does not raise."""


def check_send(response: InferResponse | ServerError | None, *, is_final: bool, is_closed: bool, num_sent: int) -> None:
    """Raise InternalError for a response after the end, or, of a model that is not decoupled, beside its one response.

    For a decoupled model called only if `is_closed`.
    """
    if is_closed:
        raise InternalError("Unable to send response. Response sender has been closed.")
    if response is not None and num_sent:
        raise InternalError("Unable to send response. Non-decoupled model cannot send more than one response.")
    if response is None and is_final and not num_sent:
        raise InternalError(
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
        )


class ResponseSender:
    """Sends the responses of one request, now or later, from any thread; calls for one request are made in turn.

    Taken from `InFlightRequest.sender` while `execute` runs. The request is in flight until `finish`; if the last
    reference to the sender goes before, the request fails.
    """

    __slots__ = ("_target",)

    def __init__(self, target: ResponseTarget) -> None:
        self._target = target

    def send(self, response: InferResponse | ServerError, *, wait: bool = True) -> None:
        """Send a response after which more may follow; `is_final` of the response does not count.

        The response belongs to the server from here on. When the client does not read as fast as the model sends, this
        waits until it does, or has left; without `wait` it exceeds the bound instead (see `has_room`). On the event
        loop it never waits. Responses sent after the client has left are dropped.

        A model that is not decoupled has one response: the first is the final one. Raises InternalError after
        the final response, also when the server ended the request, and for outputs that are not the model's:
        then the request fails.
        """
        self._target.send(response, is_final=False, wait=wait)

    def finish(self, response: InferResponse | ServerError | None = None) -> None:
        """End the request, with a last response or, if the model is decoupled, without. Never waits; raises as `send`.

        After the one response of a model that is not decoupled it does nothing more.
        """
        self._target.send(response, is_final=True, wait=False)

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has left, gave up or received an error: further responses are dropped."""
        return self._target.is_cancelled

    @property
    def has_room(self) -> bool:
        """Whether `send` would return at once."""
        return self._target.has_room

    def watch(self, *, on_cancel: Callable[[], None] | None = None, on_room: Callable[[], None] | None = None) -> None:
        """Register callbacks. Any thread may call them, without delay: they must be short and must not block.

        `on_cancel` is called once when `is_cancelled` becomes true (at once if it is), `on_room` each time when
        `has_room` becomes true again.
        """
        self._target.watch(on_cancel=on_cancel, on_room=on_room)

    def note(self, event: str, time_ns: int) -> None:
        """Record in the request's trace, if there is one, when (monotonic) a phase of the model's own began or ended.

        Call it before the final response. `PREFILL_START`, `FIRST_TOKEN` and `LAST_TOKEN` become spans.
        """
        self._target.note(event, time_ns)

    def __del__(self) -> None:
        self._target.drop()

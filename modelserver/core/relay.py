"""A stream that stands before a request's own, to see or change what is delivered."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.core.response import InferResponse
from modelserver.core.stream import ResponseStream


class RelayStream(ResponseStream):
    """Delivers the result of `pass_on` for each response. Senders may query it as they would query the reader."""

    __slots__ = ("_reader",)

    def __init__(self, reader: ResponseStream) -> None:
        self._reader = reader
        self.is_finished = False

    @property
    def reads_later(self) -> bool:  # type: ignore[override]  # a constant of each kind of reader; here, of the one behind
        return self._reader.reads_later

    @property
    def on_read(self) -> Callable[[], None] | None:
        return self._reader.on_read

    @on_read.setter
    def on_read(self, callback: Callable[[], None] | None) -> None:
        self._reader.on_read = callback

    def has_read(self) -> None:
        self._reader.has_read()

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.is_finished = response.is_final
        self._reader.deliver(self.pass_on(response))

    def pass_on(self, response: InferResponse) -> InferResponse:
        """The response that the reader gets in place of `response`. Called once for each, on the event loop thread."""
        return response

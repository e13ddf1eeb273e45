"""The server's end of a request to a `StepInstance`, without a server."""

from __future__ import annotations

from typing import Any

from modelserver.backend import InferResponse, ServerError


class Recorder:
    """Keeps what is sent; `has_room` is set by the test."""

    is_cancelled = False

    def __init__(self) -> None:
        self.has_room = True
        self.responses: list[InferResponse] = []
        self.error: ServerError | None = None
        self.is_ended = False

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:
        assert not self.is_ended, "sent after the end"
        assert not wait, "a step must not wait"
        self.is_ended = is_final
        if isinstance(response, ServerError):
            self.error = response
        elif response is not None:
            self.error = self.error or response.error
            self.responses.append(response)

    def watch(self, **_: object) -> None: ...

    def note(self, event: str, time_ns: int) -> None: ...

    def drop(self) -> None: ...

    def column(self, name: str) -> list[Any]:
        """An output's elements, over all responses."""
        found = [tensor for response in self.responses for tensor in response.outputs if tensor.name == name]
        return [element for tensor in found for element in tensor.data.tolist()]

    @property
    def text(self) -> str:
        return b"".join(self.column("text_output")).decode()

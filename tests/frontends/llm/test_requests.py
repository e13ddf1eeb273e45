"""Responses are heard where they are delivered, as long as the listener has room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.batching import tensor

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import CancelledError, InternalError, UnavailableError
from modelserver.frontends.llm.requests import Listener, Requests, only_responses, responses_of


class Model:
    """Keeps what it is asked; a test delivers the responses. `num_read` counts those that were read."""

    def __init__(self) -> None:
        self.requests: list[InFlightRequest] = []
        self.num_read = 0
        self.refuses_from = 100

    def infer(self, request: InFlightRequest) -> None:
        if len(self.requests) >= self.refuses_from:
            raise UnavailableError("full")
        request.stream.on_read = self._count
        self.requests.append(request)

    def deliver(self, index: int, word: str, *, is_final: bool = False) -> None:
        self.requests[index].stream.deliver(InferResponse([tensor("OUT", [[1.0]])], None, {"word": word}, is_final))

    def fail(self, index: int) -> None:
        self.requests[index].stream.deliver(InferResponse(error=InternalError("broken")))

    def _count(self) -> None:
        self.num_read += 1


class Ears(Listener):
    """Hears words; without `has_room` it wants to be asked first."""

    def __init__(self) -> None:
        self.words: list[tuple[int, object]] = []
        self.has_room = True
        self.is_free = asyncio.Event()

    def hear(self, prompt: int, response: InferResponse) -> bool:
        self.words.append((prompt, (response.parameters or {})["word"]))
        return self.has_room

    async def wait_for_room(self) -> None:
        await self.is_free.wait()


def ask(count: int) -> list[InFlightRequest]:
    return [InFlightRequest(model_name="m", version=None, inputs={}) for _ in range(count)]


async def test_what_is_heard_needs_no_turn_of_the_loop() -> None:
    model: Any = Model()
    ears = Ears()
    with Requests(model, ask(2), ears) as requests:
        model.deliver(1, "a")
        model.deliver(0, "b", is_final=True)
        assert ears.words == [(1, "a"), (0, "b")]
        assert model.num_read == 2
        model.deliver(1, "c", is_final=True)
        await requests.run()
    assert ears.words[2:] == [(1, "c")]
    assert not any(request.is_cancelled for request in model.requests)


async def test_a_listener_without_room_makes_the_models_wait() -> None:
    model: Any = Model()
    ears = Ears()
    with Requests(model, ask(1), ears) as requests:
        running = asyncio.ensure_future(requests.run())
        await asyncio.sleep(0)
        ears.has_room = False
        for word in ("a", "b", "c"):
            model.deliver(0, word)
        await asyncio.sleep(0)
        assert ears.words == [(0, "a")]
        assert model.num_read == 0
        ears.has_room = True
        ears.is_free.set()
        model.deliver(0, "d", is_final=True)
        await running
    assert [word for _, word in ears.words] == ["a", "b", "c", "d"]
    assert model.num_read == 4


async def test_an_error_comes_after_what_came_before_it() -> None:
    model: Any = Model()
    ears = Ears()
    ears.has_room = False
    with Requests(model, ask(2), ears) as requests:
        model.deliver(0, "a")
        model.deliver(0, "b")
        model.fail(1)
        ears.has_room = True
        ears.is_free.set()
        with pytest.raises(InternalError, match="broken"):
            await requests.run()
    assert [word for _, word in ears.words] == ["a", "b"]
    assert model.requests[0].is_cancelled


async def test_what_a_listener_raises_ends_the_call_and_not_the_model() -> None:
    class Deaf(Ears):
        def hear(self, prompt: int, response: InferResponse) -> bool:
            raise ConnectionResetError("the client has left")

    model: Any = Model()
    with Requests(model, ask(1), Deaf()) as requests:
        model.deliver(0, "a")
        with pytest.raises(ConnectionResetError):
            await requests.run()
    assert model.requests[0].is_cancelled
    assert model.num_read == 1


async def test_one_refusal_cancels_the_others() -> None:
    model: Any = Model()
    model.refuses_from = 1
    with pytest.raises(UnavailableError), Requests(model, ask(2), Ears()):
        pass
    assert model.requests[0].is_cancelled


async def test_the_only_response_of_each() -> None:
    model: Any = Model()
    asked = asyncio.ensure_future(responses_of(model, ask(2)))
    await asyncio.sleep(0)
    model.deliver(0, "a", is_final=True)
    model.requests[1].stream.deliver(InferResponse())
    found = await asked
    assert found[0] is not None
    assert found[1] is None
    asked = asyncio.ensure_future(only_responses(model, ask(1)))
    await asyncio.sleep(0)
    model.requests[2].stream.deliver(InferResponse())
    with pytest.raises(CancelledError, match="without an answer"):
        await asked

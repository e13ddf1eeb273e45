import asyncio

import pytest

from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import InternalError


def test_a_subscriber_gets_what_came_before_and_after_it() -> None:
    stream, seen = ResponseStream(), []
    first, second = InferResponse(is_final=False), InferResponse()
    stream.deliver(first)
    stream.subscribe(seen.append)
    stream.deliver(second)
    assert seen == [first, second]


def test_nothing_follows_the_final_response() -> None:
    stream, seen = ResponseStream(), []
    stream.subscribe(seen.append)
    stream.deliver(InferResponse())
    stream.deliver(InferResponse())
    assert len(seen) == 1
    assert stream.is_finished


async def test_iterating_waits_for_responses() -> None:
    stream = ResponseStream()
    loop = asyncio.get_running_loop()
    loop.call_soon(stream.deliver, InferResponse(is_final=False))
    loop.call_later(0.01, stream.deliver, InferResponse())
    assert [response.is_final async for response in stream] == [False, True]


async def test_only_raises_the_requests_error() -> None:
    stream = ResponseStream()
    stream.deliver(InferResponse(error=InternalError("the backend broke")))
    with pytest.raises(InternalError, match="the backend broke"):
        await stream.only()

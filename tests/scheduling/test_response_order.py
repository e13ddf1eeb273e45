from __future__ import annotations

from support.batching import request

from modelserver.core.response import InferResponse
from modelserver.scheduling.batch import ResponseOrder


def test_responses_wait_for_those_before_them() -> None:
    order = ResponseOrder()
    requests = [request() for _ in range(4)]
    responses = [InferResponse() for _ in requests]
    for each in requests:
        order.expect(each)
    assert order.arrange([(requests[1], responses[1])]) == []
    assert order.forget(requests[2]) == []
    assert order.arrange([(requests[0], responses[0])]) == list(zip(requests[:2], responses[:2], strict=True))
    assert order.arrange([(requests[3], responses[3])]) == [(requests[3], responses[3])]
    assert len(order) == 0


def test_forgetting_the_first_releases_the_others() -> None:
    order = ResponseOrder()
    first, second = request(), request()
    order.expect(first)
    order.expect(second)
    response = InferResponse()
    assert order.arrange([(second, response)]) == []
    assert order.forget(first) == [(second, response)]


def test_a_request_with_several_responses_is_done_with_its_final_one() -> None:
    order = ResponseOrder()
    first, second = request(), request()
    order.expect(first)
    order.expect(second)
    part, last, other = InferResponse(is_final=False), InferResponse(), InferResponse()
    assert order.arrange([(second, other)]) == []
    assert order.arrange([(first, part)]) == [(first, part)]
    assert order.arrange([(first, last)]) == [(first, last), (second, other)]

from modelserver.core.request import InferRequest, deliver_all
from modelserver.core.response import InferResponse


def test_cancel_tells_the_owner_once() -> None:
    told: list[InferRequest] = []
    request = InferRequest("m", None, {}, on_cancel=told.append)
    request.cancel()
    request.cancel()
    assert told == [request]
    assert request.is_cancelled


def test_one_call_delivers_a_whole_batch() -> None:
    requests = [InferRequest("m", None, {}) for _ in range(3)]
    deliver_all([(request, InferResponse()) for request in requests])
    assert all(request.stream.is_finished for request in requests)

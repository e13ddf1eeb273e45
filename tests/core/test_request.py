from modelserver.core.request import InferRequest


def test_cancel_tells_the_owner_once() -> None:
    told: list[InferRequest] = []
    request = InferRequest("m", None, {}, on_cancel=told.append)
    request.cancel()
    request.cancel()
    assert told == [request]
    assert request.is_cancelled

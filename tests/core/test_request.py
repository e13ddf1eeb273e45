from modelserver.core.request import InFlightRequest


def test_cancel_tells_the_owner_once() -> None:
    told: list[InFlightRequest] = []
    request = InFlightRequest(model_name="m", version=None, inputs={}, on_cancel=told.append)
    request.cancel()
    request.cancel()
    assert told == [request]
    assert request.is_cancelled

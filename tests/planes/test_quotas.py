import numpy as np
import pytest

from modelserver.auth.access import Access, parse_callers_by
from modelserver.auth.caller_limits import NO_LIMITS, CallerLimits, parse_limits, parse_limits_flag
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import ErrorCode, InvalidArgumentError, QuotaError
from modelserver.planes.quotas import Bucket, Callers, count_tokens


class Desk:
    """Callers with limits that a test changes, and a clock that it sets."""

    def __init__(self, **limits: float) -> None:
        self.limits = CallerLimits(**limits)  # type: ignore[arg-type]
        self.now_s = 100.0
        self.callers = Callers(lambda _: self.limits, clock=lambda: self.now_s)

    def admit(self, caller: str = "a") -> InFlightRequest:
        request = InFlightRequest(model_name="m", version=None, inputs={}, caller=caller)
        self.callers.admit(request)
        return request

    def refusal(self, caller: str = "a") -> QuotaError:
        with pytest.raises(QuotaError) as caught:
            self.admit(caller)
        assert caught.value.code is ErrorCode.OVERLOADED
        return caught.value


def numbers(name: str, values: list[int]) -> Tensor:
    return Tensor(name, Datatype.UINT32, np.array(values, np.uint32))


def texts(*values: bytes) -> Tensor:
    return Tensor("text_output", Datatype.BYTES, np.array(values, object))


def finish(request: InFlightRequest, *outputs: Tensor, is_final: bool = True) -> None:
    request.stream.deliver(InferResponse(list(outputs), is_final=is_final))


def test_without_limits_nothing_is_counted() -> None:
    desk = Desk(weight=3.0)
    assert desk.admit().share == 3.0
    assert not desk.callers.counts.families()[0].samples


def test_requests_per_second() -> None:
    desk = Desk(requests_per_second=2)
    desk.admit()
    desk.admit()
    assert desk.refusal().retry_after_s == pytest.approx(0.5)
    desk.admit("b")
    desk.now_s += 0.5
    desk.admit()
    desk.refusal()


def test_one_request_always_passes_a_slow_quota() -> None:
    desk = Desk(requests_per_second=0.1)
    desk.admit()
    assert desk.refusal().retry_after_s == pytest.approx(10.0)
    desk.now_s += 10
    desk.admit()


def test_requests_at_a_time() -> None:
    desk = Desk(concurrent=2)
    first, _ = desk.admit(), desk.admit()
    desk.refusal()
    finish(first, is_final=False)
    desk.refusal()
    finish(first)
    desk.admit()
    desk.refusal()


def test_a_request_that_is_refused_later_gives_its_place_back() -> None:
    desk = Desk(concurrent=1)
    request = InFlightRequest(model_name="m", version=None, inputs={}, caller="a")
    give_back = desk.callers.admit(request)
    give_back()
    finish(request)  # and not twice
    desk.admit()
    desk.refusal()


def test_tokens_are_charged_when_they_are_known() -> None:
    desk = Desk(tokens_per_second=10)
    request = desk.admit()
    finish(request, numbers("num_input_tokens", [5]), numbers("num_output_tokens", [1]), is_final=False)
    desk.admit()
    finish(request, numbers("num_input_tokens", [5]), numbers("num_output_tokens", [24]))
    assert desk.refusal().retry_after_s == pytest.approx(2.1)  # 30 of 10 are gone, and one is asked for
    desk.now_s += 2.2
    desk.admit()


def test_limits_that_change_count_at_once() -> None:
    desk = Desk(requests_per_second=1)
    desk.admit()
    desk.refusal()
    desk.limits = CallerLimits(requests_per_second=100)
    desk.now_s += 0.02
    desk.admit()
    desk.limits = NO_LIMITS
    desk.admit()


def test_the_counts_tell_why() -> None:
    desk = Desk(concurrent=1)
    finish(desk.admit(), texts(b"word"))
    desk.admit()
    desk.refusal()
    requests, tokens = desk.callers.counts.families()
    assert {(sample.labels["result"], sample.value) for sample in requests.samples} == {
        ("admitted", 2),
        ("concurrent", 1),
    }
    assert [sample.value for sample in tokens.samples] == [1]


def test_callers_of_any_number_are_forgotten() -> None:
    desk = Desk(requests_per_second=1)
    for number in range(10_050):
        desk.admit(f"caller {number}").stream.deliver(InferResponse())
    assert len(desk.callers._accounts) <= 10_000
    assert len(desk.callers.counts.families()[0].samples) <= 257


def test_tokens_of_several_choices() -> None:
    counted: dict[int, int] = {}
    outputs = [numbers("num_input_tokens", [3]), numbers("num_output_tokens", [2, 4]), numbers("index", [0, 1])]
    count_tokens(InferResponse(outputs), counted)
    count_tokens(InferResponse([numbers("num_output_tokens", [7]), numbers("index", [1])]), counted)
    assert counted == {-1: 3, 0: 2, 1: 11}  # those of each response, as in Triton's vLLM backend


def test_text_without_a_number_counts_by_its_bytes() -> None:
    counted: dict[int, int] = {}
    for _ in range(2):
        count_tokens(InferResponse([texts(b"12345678")]), counted)
    count_tokens(InferResponse([numbers("OUTPUT0", [7])]), counted)
    assert counted == {0: 4}


def test_a_bucket_keeps_a_second() -> None:
    bucket = Bucket(10.0, 0.0)
    assert bucket.wait_s(1.0, 1000.0) == 0
    bucket.take(10.0)
    assert bucket.wait_s(1.0, 1000.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", NO_LIMITS),
        ("requests_per_second=2.5", CallerLimits(requests_per_second=2.5)),
        ("concurrent=3, weight=2", CallerLimits(concurrent=3, weight=2.0)),
    ],
)
def test_limits_of_a_flag(text: str, expected: CallerLimits) -> None:
    assert parse_limits_flag("--caller-limits", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "request_per_second=1",
        "concurrent",
        "concurrent=x",
        "concurrent=1.5",
        "weight=0",
        "tokens_per_second=-1",
        "tokens_per_second=nan",
        "weight=inf",
    ],
)
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--caller-limits"):
        parse_limits_flag("--caller-limits", text)


@pytest.mark.parametrize("value", [True, "4", None, [1]])
def test_values_of_a_file(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a number"):
        parse_limits("keys.yaml", {"concurrent": value})


@pytest.mark.parametrize(
    ("text", "expected"), [("key", ""), ("none", ""), ("address", "address"), ("header:X-Tenant", "header:x-tenant")]
)
def test_who_a_caller_is(text: str, expected: str) -> None:
    assert parse_callers_by("--callers-by", text) == expected


@pytest.mark.parametrize("text", ["", "header:", "header:a b", "ip", "header:Authorization", "header:x-api-key"])
def test_who_a_caller_cannot_be(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--callers-by"):
        parse_callers_by("--callers-by", text)


@pytest.mark.parametrize(
    ("by", "peer", "expected"),
    [
        ("address", "10.0.0.7:4123", "10.0.0.7"),
        ("address", "[::1]:4123", "::1"),
        ("address", "unix", "unix"),
        ("header:x-tenant", "10.0.0.7:1", "acme"),
        ("header:x-other", "10.0.0.7:1", ""),
    ],
)
def test_a_caller_is_read_from_a_call(by: str, peer: str, expected: str) -> None:
    assert Access(callers_by=by).caller({"x-tenant": "acme"}, peer) == expected

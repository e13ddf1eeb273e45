"""Whose requests are admitted: quotas of callers, counted here and looked up in the operator's settings."""

from __future__ import annotations

import time
from collections.abc import Callable

from modelserver.auth.caller_limits import CallerLimits
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, RelayStream, ResponseStream
from modelserver.errors import ErrorCode, QueueFullError, QueueTimeoutError, QuotaError, ServerError
from modelserver.telemetry.counts import CallerCounts

# Above this number, callers with nothing in flight are forgotten, the longest unseen first.
_MAX_CALLERS = 10_000
# Outputs of language models that count tokens read and written, and the worth of text that comes without a count.
_TOLD = frozenset({"num_input_tokens", "num_output_tokens", "index", "text_output"})
_BYTES_PER_TOKEN = 4


class Bucket:
    """A token bucket: it fills at a rate, holds at most a second's worth, and may be overdrawn."""

    __slots__ = ("_level", "_rate", "_then_s")

    def __init__(self, rate: float, now_s: float) -> None:
        self._rate = rate
        self._level = max(1.0, rate)
        self._then_s = now_s

    def set_rate(self, rate: float) -> None:
        """The operator has set another rate."""
        self._rate = rate

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the bucket holds that amount; 0 if it does now."""
        most = max(1.0, self._rate)
        self._level = min(most, self._level + (now_s - self._then_s) * self._rate)
        self._then_s = now_s
        return max(0.0, (min(amount, most) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        self._level -= amount


class _Account:
    """One caller's usage."""

    __slots__ = ("num_inflight", "requests", "tokens")

    def __init__(self, now_s: float) -> None:
        self.requests = Bucket(0.0, now_s)
        self.tokens = Bucket(0.0, now_s)
        self.num_inflight = 0


class Callers:
    """The accounts of all callers. Event loop thread only.

    `limits_of` gives a caller's current limits. It is called for each request, so that changes apply at once.
    """

    def __init__(
        self, limits_of: Callable[[str], CallerLimits], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = CallerCounts()
        self._limits_of = limits_of
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, request: InFlightRequest) -> Callable[[], None]:
        """Let the request pass, with its caller's weight, or raise QuotaError.

        Call the returned function if the request is refused later: it gives back the place among those in flight.
        """
        name = request.caller
        limits = self._limits_of(name)
        request.share = limits.weight
        if not limits.is_metered:
            return _nothing
        account = self._account(name, limits)
        now_s = self._clock()
        self._check(name, limits, account, now_s)
        self.counts.record(name, "admitted")
        if limits.requests_per_second:
            account.requests.take(1.0)
        account.num_inflight += 1
        stream = MeteredStream(request.stream, self, name, account)
        request.stream = stream
        return stream.release

    def charge(self, name: str, account: _Account, num_tokens: int) -> None:
        """A language model has read or written tokens for a caller."""
        account.tokens.take(float(num_tokens))
        self.counts.record_tokens(name, num_tokens)

    def _check(self, name: str, limits: CallerLimits, account: _Account, now_s: float) -> None:
        if limits.concurrent and account.num_inflight >= limits.concurrent:
            raise self._refusal(name, "concurrent", f"{limits.concurrent} requests at a time", 1.0)
        if limits.requests_per_second:
            wait_s = account.requests.wait_s(1.0, now_s)
            if wait_s > 0:
                raise self._refusal(name, "requests", f"{limits.requests_per_second:g} requests per second", wait_s)
        if limits.tokens_per_second:
            wait_s = account.tokens.wait_s(1.0, now_s)
            if wait_s > 0:
                raise self._refusal(name, "tokens", f"{limits.tokens_per_second:g} tokens per second", wait_s)

    def _refusal(self, name: str, quota: str, allowed: str, wait_s: float) -> QuotaError:
        self.counts.record(name, quota)
        error = QuotaError(f"the quota of '{name:.200}' is {allowed}: come again in {wait_s:.3f} s")
        error.retry_after_s = wait_s
        return error

    def _account(self, name: str, limits: CallerLimits) -> _Account:
        account = self._accounts.pop(name, None)
        if account is None:
            account = _Account(self._clock())
            account.requests = Bucket(limits.requests_per_second, self._clock())
            account.tokens = Bucket(limits.tokens_per_second, self._clock())
            if len(self._accounts) >= _MAX_CALLERS:
                self._forget_one()
        else:
            account.requests.set_rate(limits.requests_per_second)
            account.tokens.set_rate(limits.tokens_per_second)
        self._accounts[name] = account  # the most recently seen caller is last
        return account

    def _forget_one(self) -> None:
        idle = next((name for name, account in self._accounts.items() if not account.num_inflight), None)
        if idle is not None:
            del self._accounts[idle]


class MeteredStream(RelayStream):
    """Counts the tokens that pass, and records the end."""

    __slots__ = ("_account", "_callers", "_counted", "_is_released", "_name")

    def __init__(self, reader: ResponseStream, callers: Callers, name: str, account: _Account) -> None:
        super().__init__(reader)
        self._callers = callers
        self._name = name
        self._account = account
        # Tokens by choice; those of the prompt have the key -1.
        self._counted: dict[int, int] = {}
        self._is_released = False

    def pass_on(self, response: InferResponse) -> InferResponse:
        if response.error is None and response.outputs:
            before = sum(self._counted.values())
            count_tokens(response, self._counted)
            if (num_new := sum(self._counted.values()) - before) > 0:
                self._callers.charge(self._name, self._account, num_new)
        if response.is_final:
            self.release()
        return response

    def release(self) -> None:
        """The request is not in flight any more."""
        if not self._is_released:
            self._is_released = True
            self._account.num_inflight -= 1


def count_tokens(response: InferResponse, counted: dict[int, int]) -> None:
    """Add the tokens that a response of a language model reports: written ones by choice, read ones with the key -1.

    Text without a count is worth a token per four bytes; other models have no tokens.
    """
    columns = {tensor.name: tensor.data.ravel().tolist() for tensor in response.outputs if tensor.name in _TOLD}
    if columns.get("num_input_tokens"):
        counted[-1] = max(counted.get(-1, 0), int(columns["num_input_tokens"][0]))
    numbers = columns.get("num_output_tokens")
    choices = columns.get("index", [])
    if numbers is None:
        for row, text in enumerate(columns.get("text_output", [])):
            choice = int(choices[row]) if row < len(choices) else row
            counted[choice] = counted.get(choice, 0) + -(-len(text) // _BYTES_PER_TOKEN)
        return
    for row, number in enumerate(numbers):
        choice = int(choices[row]) if row < len(choices) else row
        counted[choice] = counted.get(choice, 0) + int(number)


def _nothing() -> None:
    """There is nothing to give back."""


class OverloadStream(RelayStream):
    """Gives queue errors codes that name the kind of overload."""

    __slots__ = ()

    def pass_on(self, response: InferResponse) -> InferResponse:
        error = response.error
        if error is not None:
            response.error = tell_overload(error)
        return response


def tell_overload(error: ServerError) -> ServerError:
    """The same error, with the code of its kind; other errors stay as they are."""
    told: ServerError
    if isinstance(error, QueueFullError):
        told = QueueFullError(error.message, code=ErrorCode.OVERLOADED)
    elif isinstance(error, QueueTimeoutError):
        told = QueueTimeoutError(error.message, code=ErrorCode.TIMED_OUT)
    else:
        return error
    told.retry_after_s = error.retry_after_s
    return told

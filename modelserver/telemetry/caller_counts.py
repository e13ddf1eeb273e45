"""Outcomes of callers' requests at their quotas, for the metrics page."""

from __future__ import annotations

from collections import Counter

from prometheus_client.core import Metric

# How many callers are counted separately; the number of addresses and headers is unbounded.
_MAX_NAMES = 256
_OTHERS = "(others)"


class CallerCounts:
    """Requests by caller, and by `admitted` or the quota that refused them; tokens by caller. Event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._names: set[str] = set()

    def record(self, caller: str, result: str) -> None:
        self._requests[self._name(caller), result] += 1

    def record_tokens(self, caller: str, number: int) -> None:
        self._tokens[self._name(caller)] += number

    def families(self) -> list[Metric]:
        requests = Metric(
            "modelserver_caller_requests",
            "Inference requests by caller: admitted, or refused by a quota (requests, tokens, concurrent)",
            "counter",
        )
        for (caller, result), count in sorted(self._requests.items()):
            requests.add_sample(f"{requests.name}_total", {"caller": caller, "result": result}, count)
        tokens = Metric("modelserver_caller_tokens", "Tokens that language models read and wrote, by caller", "counter")
        for caller, count in sorted(self._tokens.items()):
            tokens.add_sample(f"{tokens.name}_total", {"caller": caller}, count)
        return [requests, tokens]

    def _name(self, caller: str) -> str:
        if caller not in self._names:
            if len(self._names) >= _MAX_NAMES:
                return _OTHERS
            self._names.add(caller)
        return caller

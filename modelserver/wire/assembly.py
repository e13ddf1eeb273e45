"""The memory that all requests together may use while they are received, and which give way when it is short."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Final, Protocol

# This many bytes of each request are free: the budget is for large requests.
FREE_BYTES: Final = 1024 * 1024
# A request that arrives more slowly than this gives way first, also one of a caller with little in assembly.
SLOW_BYTES_PER_S: Final = 64 * 1024
# The pace of a request is that of the last one or two of these periods.
_PERIOD_S: Final = 2.0
_LEAST_S: Final = 0.1
# The part of an IPv6 address that identifies one client.
_HOST_BITS: Final = 64


class Holder(Protocol):
    """A request that is being received, as the budget sees it."""

    __slots__ = ()

    def give_up(self) -> None:
        """Another request needs the memory: forget the received bytes, and fail soon."""


class _Account:
    """The memory that one request has taken, and its pace."""

    __slots__ = ("_base", "_mark", "_mark_s", "_since_s", "holder", "num_bytes", "owner")

    def __init__(self, holder: Holder, owner: str, now_s: float) -> None:
        self.holder = holder
        self.owner = owner
        self.num_bytes = 0
        # The pace is measured from the older of two marks, so that it is never a momentary value. It counts the free
        # bytes too: the first byte beyond them says nothing about the pace.
        self._since_s = self._mark_s = now_s
        self._base = self._mark = -FREE_BYTES

    def add(self, num_bytes: int, now_s: float) -> None:
        if now_s - self._mark_s >= _PERIOD_S:
            self._since_s, self._base = self._mark_s, self._mark
            self._mark_s, self._mark = now_s, self.num_bytes
        self.num_bytes += num_bytes

    def pace(self, now_s: float) -> float:
        """Recent bytes per second. For a stalled request it falls by itself."""
        return (self.num_bytes - self._base) / max(_LEAST_S, now_s - self._since_s)


class AssemblyBudget:
    """Bytes of unfinished requests beyond the first `FREE_BYTES` of each. Event loop thread only.

    A request is charged for the bytes that have arrived, not for the announced size: an announcement costs nothing and
    takes nothing away from others. The charge is released when the request is complete or given up.

    When the budget is short, requests give way, one after the other: first slow requests, the slowest first; then the
    slowest one of an owner with more than an equal share. Owners are API keys, or the addresses of clients without one.
    A request that would have to give way itself, because it is larger than the budget, is exempt if no other is, or if
    it is faster than the exempt one: so a lone request may be as large as its own limit allows. An exempt request takes
    nothing away from others.
    """

    __slots__ = ("_accounts", "_clock", "_exempt", "_max_bytes", "_owners", "num_bytes")

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._accounts: dict[Holder, _Account] = {}
        # Bytes taken by requests that are not exempt, in total and by owner.
        self.num_bytes = 0
        self._owners: Counter[str] = Counter()
        self._exempt: _Account | None = None

    def charge(self, num_bytes: int, holder: Holder, owner: str = "") -> bool:
        """Take `num_bytes` more for `holder`. False if it may not have them: then its whole charge is released."""
        now_s = self._clock()
        account = self._accounts.get(holder)
        if account is None:
            account = self._accounts[holder] = _Account(holder, owner, now_s)
        account.add(num_bytes, now_s)
        if account is self._exempt:
            return True
        self.num_bytes += num_bytes
        self._owners[owner] += num_bytes
        while self.num_bytes > self._max_bytes:
            # Others giving way would not help a request that is larger than the whole budget.
            last = account if account.num_bytes > self._max_bytes else self._choose(now_s)
            if last is not account:
                self._give_up(last)
            elif not self._make_exempt(account, now_s):
                self.release(holder)
                return False
        return True

    def release(self, holder: Holder) -> None:
        """Release the whole charge of `holder`, if any."""
        account = self._accounts.pop(holder, None)
        if account is None:
            return
        if account is self._exempt:
            self._exempt = None
        else:
            self._discount(account)

    def _discount(self, account: _Account) -> None:
        self.num_bytes -= account.num_bytes
        self._owners[account.owner] -= account.num_bytes
        if not self._owners[account.owner]:
            del self._owners[account.owner]

    def _choose(self, now_s: float) -> _Account:
        """The request that gives way."""
        paces = [(account.pace(now_s), account) for account in self._accounts.values() if account is not self._exempt]
        chosen = [entry for entry in paces if entry[0] < SLOW_BYTES_PER_S]
        if not chosen:
            share = self._max_bytes / len(self._owners)
            chosen = [entry for entry in paces if self._owners[entry[1].owner] > share]
        return min(chosen, key=lambda entry: entry[0])[1]

    def _make_exempt(self, account: _Account, now_s: float) -> bool:
        other = self._exempt
        if other is not None:
            if other.pace(now_s) >= account.pace(now_s):
                return False
            self._give_up(other)
        self._discount(account)
        self._exempt = account
        return True

    def _give_up(self, account: _Account) -> None:
        self.release(account.holder)
        account.holder.give_up()


def owner_of(caller: str, peer: str) -> str:
    """The owner of a request: the key of that name, or without one the client at that address and port."""
    if caller:
        return f"key {caller}"
    host = peer.rpartition(":")[0].strip("[]")
    if ":" not in host:
        return host
    try:
        return str(IPv6Address(int(IPv6Address(host)) >> _HOST_BITS << _HOST_BITS))
    except ValueError:
        return host

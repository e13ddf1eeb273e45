"""Repeated requests: the result of reading some bytes is remembered, and recalled for equal bytes.

Clients repeat themselves, so heads, header blocks, routes and the unchanging parts of infer calls are recognised by
their bytes and not parsed again. Whatever recognises requests keeps what it knows in a `Memory`, and asks a
`LearnThrottle` where learning itself is costly. `recognizes` of a port's limits (`--recognize-requests`) turns all of
it off: memories then stay empty, and each request takes the way of the first of its kind.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_FRUITLESS = 64


class Memory(Generic[Key, Value]):
    """Remembers at most `most` results by what they were read from; read `known`, and change it by `remember` only.

    It forgets everything when it is full: clients whose requests all differ gain nothing from it, and should not pay
    for bookkeeping.
    """

    __slots__ = ("_is_on", "_most", "known")

    def __init__(self, most: int, *, is_on: bool) -> None:
        self.known: dict[Key, Value] = {}
        self._most = most
        self._is_on = is_on

    def remember(self, key: Key, value: Value) -> None:
        """Recall `value` for `key` from now on, if the memory is on."""
        if not self._is_on:
            return
        if len(self.known) >= self._most:
            self.known.clear()
        self.known[key] = value


class LearnThrottle:
    """Whether to learn an unknown request: rarely, once many were learned and not recognised again.

    Some clients send nothing twice, and learning would then cost more than it brings. Never, if it is not on.
    """

    __slots__ = ("_is_on", "num_in_vain")

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        # Set to 0 when a request was recognised; a plain attribute, because most requests do this.
        self.num_in_vain = 0

    def wants(self) -> bool:
        """Called once for each unknown request."""
        self.num_in_vain += 1
        return self._is_on and (self.num_in_vain <= _FRUITLESS or self.num_in_vain % _FRUITLESS == 0)

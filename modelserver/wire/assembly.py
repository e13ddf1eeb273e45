"""The memory that all requests together may take up while they are received."""

from __future__ import annotations

# So much of each request is free: it is the large ones that are held to the budget.
FREE_BYTES = 1024 * 1024


class AssemblyBudget:
    """Bytes of unfinished requests beyond the first `FREE_BYTES` of each. Event loop thread only.

    A request charges what has arrived of it, not what it announced: a promise costs nothing, and so takes
    nothing away from others. Whatever was charged is released when the request is complete or given up.
    One request at a time may go over the budget, so that a lone one may be as large as its own limit says.
    """

    __slots__ = ("_exempt", "_max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._exempt: object = None
        self.num_bytes = 0

    def charge(self, num_bytes: int, holder: object) -> bool:
        """Whether `holder` may have so much more; it is taken if so."""
        if self.num_bytes + num_bytes > self._max_bytes and self._exempt is not holder:
            if self._exempt is not None:
                return False
            self._exempt = holder
        self.num_bytes += num_bytes
        return True

    def release(self, num_bytes: int, holder: object) -> None:
        """Give back all that `holder` has charged."""
        assert num_bytes <= self.num_bytes, "more is released than was charged"
        self.num_bytes -= num_bytes
        if self._exempt is holder:
            self._exempt = None

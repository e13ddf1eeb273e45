"""The memory that all requests together may take up while they are received."""

from __future__ import annotations

# So much of each request is free: it is the large ones that are held to the budget.
FREE_BYTES = 1024 * 1024


class AssemblyBudget:
    """Bytes of unfinished requests beyond the first `FREE_BYTES` of each. Event loop thread only.

    A request charges what has arrived of it, not what it announced: a promise costs nothing, and so takes
    nothing away from others. Whatever was charged is released when the request is complete or given up.
    """

    __slots__ = ("_max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def charge(self, num_bytes: int) -> bool:
        """Whether there is room for so much more; it is taken if so."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Give back what `charge` took."""
        assert num_bytes <= self.num_bytes, "more is released than was charged"
        self.num_bytes -= num_bytes

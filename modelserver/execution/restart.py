"""When a child process that died is started again: pure arithmetic over the times of its crashes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartOptions:
    """A crash budget: the first crash within `window_s` is followed by a restart at once, the next by growing pauses.

    So one bad request costs one start, and a client that keeps sending it cannot keep the machine busy with starts.
    """

    window_s: float = 60.0
    first_pause_s: float = 0.25
    max_pause_s: float = 30.0


class RestartPolicy:
    """Remembers the crashes of the last while. Times are seconds of any one clock."""

    def __init__(self, options: RestartOptions) -> None:
        self._options = options
        self._crashes_s: deque[float] = deque()

    @property
    def num_crashes(self) -> int:
        """Crashes in the window that ended with the last one."""
        return len(self._crashes_s)

    def pause_after_crash(self, now_s: float) -> float:
        """Seconds to wait before the next start, given that the child died now."""
        while self._crashes_s and now_s - self._crashes_s[0] > self._options.window_s:
            self._crashes_s.popleft()
        self._crashes_s.append(now_s)
        if self.num_crashes == 1:
            return 0.0
        # The exponent is capped: a float has no 2 ** 1100.
        doubled = self._options.first_pause_s * 2.0 ** min(self.num_crashes - 2, 60)
        return min(doubled, self._options.max_pause_s)

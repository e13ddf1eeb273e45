"""How many requests a batch has in flight: as many as its server makes use of."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST = 8
# What a larger number must bring at least to be kept, and how many windows pass before one is tried again.
_GAIN = 1.05
_WINDOWS_BETWEEN_TRIALS = 8
_SHORTEST_WINDOW_S = 0.25


@dataclass(slots=True)
class Concurrency:
    """Doubles `limit` as long as the rate of answers grows, then tries a quarter more from time to time.

    A refusal for overload halves it; then it grows by one per window. With `is_fixed` it stays as it is. The times are
    those of any clock.
    """

    limit: int = _FIRST
    most: int = 1024
    is_fixed: bool = False
    _since_s: float | None = None
    _num_answers: int = 0
    _best_rate: float = 0.0
    _best_limit: int = 0
    # Whether it still doubles; whether the last change is a trial; what it must not reach again after a refusal.
    _is_starting: bool = True
    _is_trial: bool = False
    _num_windows: int = 0
    _refused_s: float | None = None

    def answered(self, now_s: float) -> None:
        """A request was answered."""
        if self.is_fixed:
            return
        if self._since_s is None:
            self._since_s = now_s
        self._num_answers += 1
        length_s = now_s - self._since_s
        # Those that were in flight before the change have answers first.
        if self._num_answers >= 2 * self.limit and length_s >= _SHORTEST_WINDOW_S:
            self._judge(self._num_answers / length_s)
            self._begin_window(None)

    def refused(self, now_s: float) -> None:
        """The server had too much to do. Refusals that arrive together count once."""
        if self.is_fixed or (self._refused_s is not None and now_s - self._refused_s < _SHORTEST_WINDOW_S):
            return
        self._refused_s = now_s
        self.limit = max(1, self.limit // 2)
        self._is_starting = self._is_trial = False
        self._best_limit, self._best_rate = self.limit, 0.0
        self._begin_window(None)

    def _begin_window(self, since_s: float | None) -> None:
        self._since_s, self._num_answers = since_s, 0

    def _judge(self, rate: float) -> None:
        if self._is_starting or self._is_trial:
            if rate >= self._best_rate * _GAIN:
                self._best_rate, self._best_limit = rate, self.limit
                if self._is_starting:
                    self._grow(2 * self.limit)
                    self._is_starting = self.limit < self.most
            else:
                self._is_starting = False
                self.limit = self._best_limit
            self._is_trial = False
            return
        self._num_windows += 1
        if self._refused_s is not None:
            self._grow(self.limit + 1)
            return
        # The server may have become slower, so that the best rate is not forever.
        self._best_rate += (rate - self._best_rate) / 2
        if self._num_windows % _WINDOWS_BETWEEN_TRIALS == 0:
            self._is_trial = True
            self._grow(self.limit + max(1, self.limit // 4))

    def _grow(self, limit: int) -> None:
        self.limit = min(self.most, limit)

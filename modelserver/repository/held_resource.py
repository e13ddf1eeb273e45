"""A reference-counted resource on disk that the loaded versions of a model need."""

from __future__ import annotations

import abc
import threading


class HeldResource(abc.ABC):
    """Held once by its creator, and freed after its last release.

    `acquire` and `release` may be called from any thread.
    """

    def __init__(self) -> None:
        self._num_holders = 1
        self._holders_lock = threading.Lock()  # guards _num_holders

    def acquire(self) -> None:
        """Hold it once more."""
        with self._holders_lock:
            assert self._num_holders > 0, "a resource is acquired before its last release"
            self._num_holders += 1

    def release(self) -> None:
        """Release one hold; the last release frees the resource. Blocking."""
        with self._holders_lock:
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            self._free()

    @abc.abstractmethod
    def _free(self) -> None:
        """Free the resource after the last release. Never raises."""

"""Follows a repository's files, and loads and unloads models as they change.

A change counts when two scans in a row have seen the same state of a model's files, so that files that are still
being copied are not loaded. Models are followed independently: a slow or broken model does not block others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from modelserver.core.clock import Clock, SystemClock
from modelserver.errors import ConfigError, ServerError, UnsupportedError
from modelserver.repository.fingerprint import ModelFingerprint
from modelserver.repository.state import VersionsFailedError

logger = logging.getLogger(__name__)

# The files of each model; None for a model that must not be changed (marked as incomplete,
# unreadable, or in several repositories).
PollScan = Mapping[str, ModelFingerprint | None]

_LONGEST_BACK_OFF_S = 600.0


@dataclass(frozen=True, slots=True)
class PollPlan:
    """Models to load (or reload) and to unload now."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


def diff(previous: PollScan, current: PollScan, applied: Mapping[str, ModelFingerprint]) -> PollPlan:
    """The state on which two scans in a row agree and that differs from the `applied` one."""
    load = [
        name
        for name, fingerprint in current.items()
        if fingerprint is not None and fingerprint == previous.get(name) and fingerprint != applied.get(name)
    ]
    unload = [name for name in applied if name not in current and name not in previous]
    return PollPlan(tuple(sorted(load)), tuple(sorted(unload)))


def back_off_s(num_failures: int, interval_s: float) -> float:
    """How long to wait before loading unchanged files again after this number of failures in a row."""
    return min(interval_s * 2.0 ** min(num_failures, 20), _LONGEST_BACK_OFF_S)


@dataclass(frozen=True, slots=True)
class _Retry:
    """A load that failed and may succeed later without a change of files."""

    num_failures: int
    due_ns: int


class Poller:
    """One task on the event loop that scans and acts. `scan`, `load` and `unload` are the repository's."""

    def __init__(
        self,
        scan: Callable[[], Awaitable[PollScan]],
        load: Callable[[str], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        *,
        interval_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scan = scan
        self._load = load
        self._unload = unload
        self._interval_s = interval_s
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._previous: PollScan = {}
        self._applied: dict[str, ModelFingerprint] = {}
        self._retries: dict[str, _Retry] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._runner: asyncio.Task[None] | None = None

    def start(self, applied: PollScan, failed: Mapping[str, ServerError]) -> None:
        """Begin to poll. `applied` is the scan that the models were loaded from, `failed` the loads that failed."""
        self._previous = applied
        self._applied = {name: fingerprint for name, fingerprint in applied.items() if fingerprint is not None}
        for name, error in failed.items():
            self._note(name, error)
        self._runner = asyncio.get_running_loop().create_task(self._run(), name="repository poller")

    async def stop(self) -> None:
        """End polling; started operations continue in the repository."""
        tasks = [task for task in (self._runner, *self._busy.values()) if task is not None]
        self._runner = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def poll_once(self) -> None:
        """Scan once and start the necessary loads and unloads; returns without waiting for them."""
        try:
            current = await self._scan()
        except OSError as error:
            logger.warning("the model repository cannot be read, nothing is changed: %s", error)
            return
        plan = diff(self._previous, current, self._applied)
        self._previous = current
        for name in plan.unload:
            if name not in self._busy:
                del self._applied[name]
                self._retries.pop(name, None)
                self._begin(name, self._unload)
        for name in (*plan.load, *self._due(current)):
            fingerprint = current[name]
            if name not in self._busy and fingerprint is not None:
                if self._applied.get(name) != fingerprint:
                    self._retries.pop(name, None)
                self._applied[name] = fingerprint
                self._begin(name, self._load)

    async def wait_idle(self) -> None:
        """Return when all operations that a poll has started are done."""
        while self._busy:
            await asyncio.wait(list(self._busy.values()))

    async def _run(self) -> None:
        while True:
            await self._sleep(self._interval_s)
            try:
                await self.poll_once()
            except Exception:
                logger.exception("polling the model repository failed; the next poll comes as planned")

    def _due(self, current: PollScan) -> list[str]:
        """Models whose load failed long enough ago and whose files are unchanged."""
        now_ns = self._clock.now_ns()
        return [
            name
            for name, retry in self._retries.items()
            if retry.due_ns <= now_ns and current.get(name) == self._applied.get(name)
        ]

    def _begin(self, name: str, operation: Callable[[str], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._perform(name, operation), name=f"poll of {name}")
        self._busy[name] = task
        task.add_done_callback(lambda _: self._busy.pop(name, None))

    async def _perform(self, name: str, operation: Callable[[str], Awaitable[None]]) -> None:
        try:
            await operation(name)
        except ServerError as error:  # the repository has logged it
            self._note(name, error)
        else:
            self._retries.pop(name, None)

    def _note(self, name: str, error: ServerError) -> None:
        """Schedule a retry, unless only a change of the files can help."""
        needs_change = error.needs_change if isinstance(error, VersionsFailedError) else False
        if needs_change or isinstance(error, ConfigError | UnsupportedError):
            self._retries.pop(name, None)
            return
        before = self._retries.get(name)
        num_failures = 1 if before is None else before.num_failures + 1
        wait_ns = int(back_off_s(num_failures, self._interval_s) * 1e9)
        self._retries[name] = _Retry(num_failures, self._clock.now_ns() + wait_ns)

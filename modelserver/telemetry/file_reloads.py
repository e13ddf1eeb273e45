"""Results of reloading changed files, and expiry times of certificates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric


@dataclass(slots=True)
class _Reload:
    is_current: bool = True
    num_failures: int = 0
    # The last unreadable version: several ports that share files try the same one.
    failed: Hashable | None = None


class FileReloads:
    """By the flag that names the files, which are in use from their first `took` on. Event loop thread only."""

    def __init__(self) -> None:
        self._reloads: dict[str, _Reload] = {}
        self._not_after_s: dict[str, float] = {}

    def took(self, flag: str, not_after_s: Mapping[str, float] | None = None) -> None:
        """Record that the current files are in use; `not_after_s` has the certificates' expiry (Unix time) by flag."""
        reload = self._reloads.setdefault(flag, _Reload())
        reload.is_current, reload.failed = True, None
        self._not_after_s.update(not_after_s or {})

    def failed(self, flag: str, version: Hashable) -> None:
        """Record that the current files are invalid, so the old ones stay in use. One `version` counts once."""
        reload = self._reloads.setdefault(flag, _Reload())
        reload.is_current = False
        if reload.failed != version:
            reload.failed = version
            reload.num_failures += 1

    def families(self) -> list[Metric]:
        """The Prometheus families; without reloadable files they have no samples."""
        failures = Metric(
            "modelserver_reload_failures",
            "How often files that changed were no good, so that the old ones stayed in use, by the flag of the files",
            "counter",
        )
        current = Metric(
            "modelserver_last_reload_successful",
            "1 if the files of the flag are in use as they are, 0 while older ones stay in use",
            "gauge",
        )
        for flag, reload in sorted(self._reloads.items()):
            failures.add_sample(f"{failures.name}_total", {"flag": flag}, reload.num_failures)
            current.add_sample(current.name, {"flag": flag}, int(reload.is_current))
        expiry = Metric(
            "modelserver_certificate_not_after_timestamp_seconds",
            "Unix time at which the first of the certificates expires that are in use of the flag's file",
            "gauge",
        )
        for flag, seconds in sorted(self._not_after_s.items()):
            expiry.add_sample(expiry.name, {"flag": flag}, seconds)
        return [failures, current, expiry]

"""The state of each version of a model: whether it loads, serves or leaves, or why it does none of these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from modelserver.errors import ServerError
from modelserver.repository.plan import LoadedVersion
from modelserver.repository.state import UNLOADED, IndexEntry, ModelState, VersionsFailedError, describe_failure


class VersionStates:
    """`loading` are the versions that a load brings up, once it knows; `is_loading` from its begin to its end.

    `unloaded` are versions that served, or would have if other versions had not failed. `note` is the reason text of
    ready versions: the override by which they serve.
    """

    def __init__(self, name: str) -> None:
        self.loading: tuple[int, ...] = ()
        self.is_loading = False
        self.unloaded: set[int] = set()
        self.note = ""
        self._name = name
        # Why the last load failed: by version, or under None when no version was reached.
        self._failures: dict[int | None, str] = {}

    def note_failure(self, error: ServerError, version: int | None, loaded: Collection[int]) -> None:
        """Record a failed load of that version, or of all; `loaded` versions still serve."""
        self.forget_failures(version)
        if isinstance(error, VersionsFailedError):
            self._failures.update(error.reasons.items())
        elif version is None or version in loaded:
            self._failures[version] = describe_failure(error)

    def forget_failures(self, version: int | None) -> None:
        """Drop the recorded states when another operation on that version, or all, begins."""
        if version is None:
            self._failures = {}
        else:
            self._failures = {key: reason for key, reason in self._failures.items() if key not in (None, version)}

    def index(self, loaded: Mapping[int, LoadedVersion], retiring: Iterable[LoadedVersion]) -> list[IndexEntry]:
        """One row per known version, ascending; one without a version if none is known."""
        general = self._failures.get(None, "")
        rows: dict[int, tuple[ModelState, str]] = {}
        rows |= dict.fromkeys(self.unloaded, (ModelState.UNAVAILABLE, general or UNLOADED))
        rows |= {
            version: (ModelState.UNAVAILABLE, reason)
            for version, reason in self._failures.items()
            if version is not None
        }
        rows |= {each.version: (ModelState.UNLOADING, each.leaving) for each in retiring}
        rows |= dict.fromkeys(self.loading, (ModelState.LOADING, ""))
        rows |= {version: (ModelState.READY, self._failures.get(version, general) or self.note) for version in loaded}
        rows |= {
            version: (ModelState.UNAVAILABLE, each.model.fault) for version, each in loaded.items() if each.model.fault
        }
        if rows:
            return [IndexEntry(self._name, version, *rows[version]) for version in sorted(rows)]
        if self.is_loading:
            return [IndexEntry(self._name, None, ModelState.LOADING)]
        state = ModelState.UNAVAILABLE if general else ModelState.UNKNOWN
        return [IndexEntry(self._name, None, state, general)]

"""Which of the versions on disk a version policy serves."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.config.schema import ModelVersionPolicy


def served_versions(policy: ModelVersionPolicy | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions of `available` to serve, ascending; no policy means the highest one.

    Versions that the policy names but that do not exist are left out: see `missing_versions`.
    """
    ascending = sorted(set(available))
    if policy is not None and policy.all is not None:
        return tuple(ascending)
    if policy is not None and policy.specific is not None:
        wanted = frozenset(policy.specific.versions)
        return tuple(version for version in ascending if version in wanted)
    latest = policy.latest if policy is not None else None
    num_versions = max(1, latest.num_versions) if latest is not None else 1
    return tuple(ascending[-num_versions:])


def missing_versions(policy: ModelVersionPolicy | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions that a `specific` policy names but that do not exist, ascending."""
    if policy is None or policy.specific is None:
        return ()
    return tuple(sorted(set(policy.specific.versions) - set(available)))

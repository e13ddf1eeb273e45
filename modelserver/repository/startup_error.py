"""The end of a start with --exit-on-error."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.errors import ServerError


class StartupError(ServerError):
    """Models that should have been loaded at start were not; `failures` has the error of each."""

    def __init__(self, failures: Mapping[str, ServerError]) -> None:
        self.failures = dict(failures)
        lines = "".join(f"\n  {name}: {error.message}" for name, error in self.failures.items())
        which, them = ("1 model", "it") if len(self.failures) == 1 else (f"{len(self.failures)} models", "them")
        super().__init__(f"{which} could not be loaded (--exit-on-error=false starts without {them}):{lines}")

"""Files of API keys, and the keys themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modelserver.auth.api_keys import ApiKey, Scope, create_key
from modelserver.auth.caller_limits import NO_LIMITS, CallerLimits


class KeyFile:
    """A file of keys at `path`; `texts` has what their owners send, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, str] = {}
        self._keys: dict[str, ApiKey] = {}
        self.write()

    def add(self, name: str, *scopes: Scope, models: tuple[str, ...] = (), limits: CallerLimits = NO_LIMITS) -> str:
        """Make a key, and have it in the file; what its owner sends."""
        self.texts[name], self._keys[name] = create_key(name, frozenset(scopes), models, limits)
        self.write()
        return self.texts[name]

    def remove(self, name: str) -> None:
        """Take a key back."""
        del self._keys[name]
        self.write()

    def change(self, name: str, limits: CallerLimits) -> None:
        """Give a key other limits."""
        self._keys[name] = replace(self._keys[name], limits=limits)
        self.write()

    def write(self, text: str | None = None) -> None:
        """Replace the file in one step, by its entries or by `text`."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(key.line for key in self._keys.values()) if text is None else text)
        new.replace(self.path)

"""Which loads wait for which: a model may load others during its own load, but a circle would never end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modelserver.errors import UnavailableError


class LoadWaits:
    """The names of models whose `initialize` waits for an operation on another model."""

    def __init__(self) -> None:
        self._awaited: dict[str, list[str]] = {}

    @contextmanager
    def wait(self, loading: str, name: str) -> Iterator[None]:
        """Encloses an operation on `name` for the model `loading`, which is being loaded; "" for none.

        Raises UnavailableError if it would wait for itself.
        """
        if not loading:
            yield
            return
        chain = self._chain(name, loading)
        if chain is not None:
            raise UnavailableError(
                f"model '{name}' is being loaded, and waits for this ({' -> '.join([loading, *chain])}): it cannot be "
                "loaded or unloaded by the initialize of a model that it waits for"
            )
        awaited = self._awaited.setdefault(loading, [])
        awaited.append(name)
        try:
            yield
        finally:
            awaited.remove(name)
            if not awaited:
                self._awaited.pop(loading, None)

    def _chain(self, name: str, wanted: str) -> list[str] | None:
        """The models from `name` to `wanted`, each of which waits for the next."""
        if name == wanted:
            return [name]
        for other in self._awaited.get(name, ()):
            chain = self._chain(other, wanted)
            if chain is not None:
                return [name, *chain]
        return None

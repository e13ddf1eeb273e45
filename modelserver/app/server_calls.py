"""The calls that backends may make to the server of their models, answered by the planes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from modelserver.backend import ModelMetrics
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError
from modelserver.planes.control import ControlParameter, ControlPlane
from modelserver.planes.data import DataPlane


class LoadDeadlocks:
    """Refuses deadlocks of loads: a model may load others during its own load, but a circle would never end.

    It keeps the names of the models whose `initialize` waits for an operation on another model.
    """

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


class ServerCallsOfPlanes:
    """The `ServerCalls` of a server, answered by its planes. Every method is called from the event loop thread.

    `has_control`: models may load and unload others, as clients may (`--model-control-mode=explicit`).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        dataplane: DataPlane,
        controlplane: ControlPlane,
        metrics: ModelMetrics,
        *,
        has_control: bool,
    ) -> None:
        self._loop = loop
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._metrics = metrics
        self._has_control = has_control
        self._load_deadlocks = LoadDeadlocks()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def metrics(self) -> ModelMetrics:
        return self._metrics

    def infer(self, request: InFlightRequest) -> ResponseStream:
        return self._dataplane.infer(request)

    async def ask(self, topic: str, arguments: Mapping[str, Any]) -> Any:
        """Raises ServerError; InvalidArgumentError for an unknown topic."""
        name = str(arguments.get("name", ""))
        if topic == "is_model_ready":
            return self._is_ready(name, str(arguments.get("version", "")))
        if topic not in ("load_model", "unload_model"):
            raise InvalidArgumentError(f"a server cannot be asked for '{topic}'")
        if not self._has_control:
            raise UnavailableError(
                "explicit model load / unload is not allowed if polling is enabled: start the server with "
                "--model-control-mode=explicit"
            )
        with self._load_deadlocks.wait(str(arguments.get("while_loading", "")), name):
            if topic == "load_model":
                parameters: dict[str, ControlParameter] = dict(arguments.get("files") or {})
                if arguments.get("config"):
                    parameters["config"] = str(arguments["config"])
                await self._controlplane.load(name, parameters)
            else:
                await self._controlplane.unload(name, {"unload_dependents": bool(arguments.get("unload_dependents"))})
        return None

    def _is_ready(self, name: str, version: str) -> bool:
        if version and not version.isdecimal():
            raise InvalidArgumentError(f"expected the number of a version of model '{name}', got '{version}'")
        try:
            return self._dataplane.model_is_ready(name, int(version) if version else None)
        except NotFoundError:
            return False

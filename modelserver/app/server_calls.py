"""The calls that backends may make to the server of their models, answered by the planes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from modelserver.app.load_deadlocks import LoadWaits
from modelserver.backend import ModelMetrics
from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError
from modelserver.planes.control import ControlParameter, ControlPlane
from modelserver.planes.data import DataPlane


class PlaneCalls:
    """The `ServerCalls` of a server. Every method is called from the event loop thread.

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
        self._load_waits = LoadWaits()

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
        with self._load_waits.wait(str(arguments.get("while_loading", "")), name):
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

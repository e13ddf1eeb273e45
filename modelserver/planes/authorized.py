"""The planes as the frontends see them where API keys are set: each call reaches only the models of its caller's key.

Calls that concern the whole server need a key for all models. Nothing passes by default: a method that a plane has and
these lack cannot be reached on a server with keys.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from modelserver.auth.api_keys import CALLER, ApiKey, KeyRing
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.errors import (
    LoadOnDemandError,
    PermissionDeniedError,
    ServerError,
    UnauthenticatedError,
    UnsupportedError,
)
from modelserver.telemetry.audit import record

if TYPE_CHECKING:
    from modelserver.config.schema import ModelConfig
    from modelserver.core.request import InFlightRequest, LoadedAdapter
    from modelserver.core.response import ResponseStream
    from modelserver.execution.model import Model
    from modelserver.planes.adapters import AdapterLoads
    from modelserver.planes.control import ControlParameter, ControlPlane
    from modelserver.planes.data import DataPlane, InferPlane, ModelLoad, ModelMetadata, ServerMetadata
    from modelserver.planes.shared_memory import SharedMemory
    from modelserver.repository.state import IndexEntry
    from modelserver.repository.traffic import Traffic
    from modelserver.store.store import Store
    from modelserver.telemetry.log_settings import LogControl
    from modelserver.telemetry.statistics_snapshot import StatisticsSnapshot
    from modelserver.telemetry.trace_settings import Changes

Outputs = TypeVar("Outputs")

_Settings = Mapping[str, str | list[str]]


def authorized_planes(
    dataplane: DataPlane, controlplane: ControlPlane, keys: KeyRing | None
) -> tuple[AnyDataPlane, AnyControlPlane]:
    """Both planes, with a check of each call's key if there are keys.

    Errors are those of the planes, of `ApiKey` and of `KeyRing`.
    """
    if keys is None:
        return dataplane, controlplane
    return AuthorizedDataPlane(dataplane, keys), AuthorizedControlPlane(controlplane)


class AuthorizedInferPlane:
    """Inference with the caller's models."""

    def __init__(self, plane: InferPlane, keys: KeyRing) -> None:
        self._infer = plane.infer
        self._check_inputs = plane.check_inputs
        self._keys = keys

    def infer(self, request: InFlightRequest) -> ResponseStream:
        key = _caller()
        self._keys.check_current(key)  # a stream may have begun long ago
        key.check_model(request.model_name)
        request.caller = key.name
        return self._infer(request)

    def check_inputs(self, request: InFlightRequest) -> None:
        _caller().check_model(request.model_name)
        self._check_inputs(request)


class AuthorizedDataPlane(AuthorizedInferPlane):
    """As `DataPlane`, for the caller's models."""

    def __init__(self, plane: DataPlane, keys: KeyRing) -> None:
        super().__init__(plane, keys)
        self._plane = plane

    # For health checks, which have no caller.

    @property
    def is_live(self) -> bool:
        return self._plane.is_live

    @property
    def is_ready(self) -> bool:
        return self._plane.is_ready

    @property
    def is_shutting_down(self) -> bool:
        return self._plane.is_shutting_down

    def readiness_state(self) -> str:
        return self._plane.readiness_state()

    def num_inflight(self) -> int:
        return self._plane.num_inflight()

    def call_at_shutdown(self, function: Callable[[], None]) -> None:
        self._plane.call_at_shutdown(function)

    def unready_because(self) -> list[str]:
        """The part that callers without a key may know: the number of problems, no names."""
        reasons = self._plane.unready_because()
        if CALLER.get() is None and reasons:
            return [f"not ready for reasons ({len(reasons)}) that /v2/overview lists for callers with an API key"]
        return reasons

    # Of one model, or of the caller's.

    def model_is_ready(self, name: str, version: int | None = None) -> bool:
        _caller().check_model(name)
        return self._plane.model_is_ready(name, version)

    def load_of(self, name: str, version: int | None = None) -> ModelLoad:
        _caller().check_model(name)
        return self._plane.load_of(name, version)

    def model_names(self) -> list[str]:
        key = _caller()
        return [name for name in self._plane.model_names() if key.allows_model(name)]

    async def unloaded_configs(self) -> list[ModelConfig]:
        key = _caller()
        return [config for config in await self._plane.unloaded_configs() if key.allows_model(config.name)]

    def model_metadata(self, name: str, version: int | None = None) -> ModelMetadata:
        _caller().check_model(name)
        return self._plane.model_metadata(name, version)

    def model_config(self, name: str, version: int | None = None) -> ModelConfig:
        _caller().check_model(name)
        return self._plane.model_config(name, version)

    def adapters_of(self, name: str) -> tuple[LoadedAdapter, ...]:
        _caller().check_model(name)
        return self._plane.adapters_of(name)

    def model_directories(self, name: str) -> tuple[Path, ...]:
        _caller().check_model(name)
        return self._plane.model_directories(name)

    def store_of(self, name: str) -> Store | None:
        _caller().check_model(name)
        return self._plane.store_of(name)

    def statistics(self, name: str = "", version: int | None = None) -> list[tuple[Model, StatisticsSnapshot]]:
        key = _caller()
        if name:
            key.check_model(name)
        return [row for row in self._plane.statistics(name, version) if key.allows_model(row[0].name)]

    def reset_statistics(self, name: str = "", version: int | None = None) -> None:
        _check("reset statistics", name)
        self._plane.reset_statistics(name, version)

    def trace_settings(self, model_name: str = "") -> _Settings:
        _check("read trace settings", model_name)
        return self._plane.trace_settings(model_name)

    def update_trace_settings(self, changes: Changes, model_name: str = "") -> _Settings:
        _check("trace settings", model_name)
        return self._plane.update_trace_settings(changes, model_name)

    # Of the server.

    def recent_traces(self) -> list[dict[str, Any]]:
        _check("read traces", "")
        return self._plane.recent_traces()

    def server_metadata(self) -> ServerMetadata:
        return self._plane.server_metadata()

    @property
    def shared_memory(self) -> SharedMemory:
        _check("shared memory", "")
        return self._plane.shared_memory


class AuthorizedControlPlane:
    """As `ControlPlane`, for the caller's models."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    @property
    def logs(self) -> LogControl:
        _check("log settings", "")
        return self._plane.logs

    def index(self, ready_only: bool = False, repository_name: str = "") -> list[IndexEntry]:
        key = _caller()
        return [row for row in self._plane.index(ready_only, repository_name) if key.allows_model(row.name)]

    async def load(
        self,
        name: str,
        parameters: Mapping[str, ControlParameter] | None = None,
        *,
        repository_name: str = "",
        version: int | None = None,
    ) -> None:
        _check("load", name)
        await self._plane.load(name, parameters, repository_name=repository_name, version=version)

    async def unload(
        self,
        name: str,
        parameters: Mapping[str, ControlParameter] | None = None,
        *,
        repository_name: str = "",
        version: int | None = None,
    ) -> None:
        _check("unload", name)
        await self._plane.unload(name, parameters, repository_name=repository_name, version=version)

    def keep(self, name: str, keep_alive_s: float) -> None:
        _check("load", name)
        self._plane.keep(name, keep_alive_s)

    def adapters_for(self, action: str, model: str) -> AdapterLoads:
        _check(f"adapter: {action}", model)
        return self._plane.adapters_for(action, model)

    def store_for(self, action: str, *names: str) -> Store:
        for name in names or ("",):
            _check(f"store: {action}", name)
        return self._plane.store_for(action, *names)

    def traffic(self, name: str) -> Traffic | None:
        _check("read traffic", name)
        return self._plane.traffic(name)

    def traffic_shares(self, name: str) -> Mapping[int, float]:
        _check("read traffic", name)
        return self._plane.traffic_shares(name)

    def shadow_counts(self, name: str) -> dict[str, dict[str, int]]:
        _check("read traffic", name)
        return self._plane.shadow_counts(name)

    async def set_traffic(self, name: str, document: Mapping[str, Any], *, persists: bool = False) -> None:
        _check("traffic", name)
        await self._plane.set_traffic(name, document, persists=persists)

    async def remove_traffic(self, name: str) -> None:
        _check("traffic", name)
        await self._plane.remove_traffic(name)

    async def add_archive(self, name: str, directory: str) -> None:
        _check("load", name)
        await self._plane.add_archive(name, directory)

    async def remove_archive(self, name: str) -> None:
        _check("unload", name)
        await self._plane.remove_archive(name)

    def archives(self) -> dict[str, str]:
        key = _caller()
        return {name: path for name, path in self._plane.archives().items() if key.allows_model(name)}


# Frontends have the planes, or those that check API keys before them. As texts, so that whoever names the planes need
# not import a repository.
AnyDataPlane: TypeAlias = "DataPlane | AuthorizedDataPlane"
AnyControlPlane: TypeAlias = "ControlPlane | AuthorizedControlPlane"


def _caller() -> ApiKey:
    key = CALLER.get()
    if key is None:
        raise UnauthenticatedError("this needs an API key: only the health of the whole server can be read without one")
    return key


def _check(action: str, name: str) -> None:
    """Check that the caller may do that to a model, or to the whole server; a refusal is recorded."""
    try:
        key = _caller()
        if name:
            key.check_model(name)
        elif key.models:
            raise PermissionDeniedError(
                f"the API key '{key.name}' is for some models only, and this concerns the whole server"
            )
    except ServerError as error:
        record(action, name, error)
        raise


async def only(model: str, responses: AsyncGenerator[Outputs, None], hint: str) -> Outputs:
    """The outputs of a model that answers once. Raises UnsupportedError for any other, with the hint what to use."""
    found = None
    async with aclosing(responses):
        async for outputs in responses:
            if found is not None:
                raise UnsupportedError(f"model '{model}' answers more than once: use {hint}")
            found = outputs
    if found is None:
        raise UnsupportedError(f"model '{model}' ended without an answer")
    return found


async def ask(dataplane: AnyDataPlane, make: Callable[[], InFlightRequest]) -> AsyncGenerator[Sequence[Tensor], None]:
    """The outputs of each response to a request, whose model is loaded first if it is loaded on demand.

    `make` makes the request, with a stream whose reader says how far it is; it may be called twice. Leaving the loop
    early cancels the request. Raises the ServerError that the server or the model refuses it with.
    """
    # The plane may put others before the reader's stream, to log or to trace.
    try:
        request = make()
        stream = request.stream
        dataplane.infer(request)
    except LoadOnDemandError as unloaded:
        await unloaded.load()
        request = make()
        stream = request.stream
        dataplane.infer(request)
    try:
        async for response in stream:
            if response.error is not None:
                raise response.error
            if response.outputs:
                yield response.outputs
            stream.has_read()
    finally:
        if not stream.is_finished:
            request.cancel()

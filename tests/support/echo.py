"""Models that answer with their inputs, and a repository of them: a real `DataPlane` without execution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from modelserver.config import schema
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import CancelledError, NotFoundError, UnavailableError, UnsupportedError
from modelserver.planes.data import DataPlane, ServerMetadata
from modelserver.repository.state import IndexEntry, ModelState
from modelserver.repository.traffic import TrafficTable
from modelserver.telemetry.host import MemoryUsage
from modelserver.telemetry.statistics import ModelStatistics


class EchoModel:
    """One input `INPUT`, answered as `OUTPUT` on the next turn of the loop; with `holds`, not before `release`.

    `submit` can be replaced by a test that wants other answers.
    """

    is_ensemble = False
    inflight = 0

    def __init__(
        self,
        name: str = "echo",
        datatype: Datatype = Datatype.FP32,
        *,
        dims: tuple[int, ...] = (-1,),
        max_batch_size: int = 0,
        version: int = 1,
        holds: bool = False,
    ) -> None:
        self.name = name
        self.version = version
        self.config = schema.ModelConfig(
            name=name,
            backend="echo",
            max_batch_size=max_batch_size,
            input=(schema.ModelInput(name="INPUT", data_type=datatype, dims=dims),),
            output=(schema.ModelOutput(name="OUTPUT", data_type=datatype, dims=dims),),
        )
        self.signature = ModelSignature(self.config)
        self.statistics = ModelStatistics()
        self.holds = holds
        self.held: list[InFlightRequest] = []
        self.cancelled: list[InFlightRequest] = []
        self.ready = True
        self.is_decoupled = False
        self.refuses: Exception | None = None
        self.respond: Callable[[InFlightRequest], Iterable[InferResponse]] = self._echo

    def memory_usage(self) -> tuple[MemoryUsage, ...]:
        return (MemoryUsage("CPU", 0, 12345),)

    def submit(self, request: InFlightRequest) -> ResponseStream:
        if self.refuses is not None:
            raise self.refuses
        request.on_cancel = self._cancel
        if self.holds:
            self.held.append(request)
        else:
            asyncio.get_running_loop().call_soon(self._answer, request)
        return request.stream

    def release(self, request: InFlightRequest) -> None:
        """Answer a held request."""
        self.held.remove(request)
        self._answer(request)

    def is_ready(self) -> bool:
        return self.ready

    def _answer(self, request: InFlightRequest) -> None:
        for response in self.respond(request):
            request.stream.deliver(response)

    def _echo(self, request: InFlightRequest) -> Iterable[InferResponse]:
        tensor = request.inputs["INPUT"]
        return [InferResponse([Tensor("OUTPUT", tensor.datatype, tensor.data)])]

    def _cancel(self, request: InFlightRequest) -> None:
        self.cancelled.append(request)
        if request in self.held:
            self.held.remove(request)
            request.stream.deliver(InferResponse(error=CancelledError("the request was cancelled")))


class EchoOnDemand:
    """What `DataPlane` asks about models that may sleep: here none does."""

    is_active = False
    on_active: Callable[[], None]

    def can_load(self, _name: str, _version: int | None) -> bool:
        return False


class EchoRepository:
    """What `DataPlane` asks of a repository, over models that are already there."""

    def __init__(self, *models: EchoModel) -> None:
        self._models = {model.name: model for model in models}
        self.is_complete = True
        self.on_demand = EchoOnDemand()
        self.traffic = TrafficTable()

    def get(self, name: str, version: int | None) -> EchoModel:
        model = self._models.get(name)
        if model is None:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if version not in (None, model.version):
            raise NotFoundError(f"Request for unknown model: '{name}' version {version} is not found")
        if not model.ready:
            raise UnavailableError(f"Request for unknown model: '{name}' has no available versions")
        return model

    def sequence_holder(self, _name: str, _version: int | None, _sequence_id: int | str) -> None:
        """Any model takes any request of a sequence."""

    def ready_versions(self, name: str) -> tuple[int, ...]:
        return (self.get(name, None).version,)

    def models(self) -> Iterable[EchoModel]:
        return self._models.values()

    def is_ready(self, *, strict: bool) -> bool:
        return self.is_complete or not strict

    def unready_because(self, *, strict: bool) -> list[str]:
        return [] if self.is_ready(strict=strict) else ["a model does not serve"]


def echo_dataplane(*models: EchoModel, logs_requests: bool = False) -> DataPlane:
    """A real data plane over `models`."""
    metadata = ServerMetadata("modelserver", "1.2.3", ("statistics", "model_configuration"))
    return DataPlane(EchoRepository(*models), metadata, logs_requests=logs_requests)  # type: ignore[arg-type]


class EchoControlPlane:
    """Lists given rows and remembers what it was asked to load and unload."""

    def __init__(self, *rows: IndexEntry) -> None:
        self.rows = rows
        self.asked: list[tuple[str, str, dict[str, object]]] = []
        self.refuses: Exception | None = None

    def index(self, ready_only: bool = False, repository_name: str = "") -> list[IndexEntry]:
        _refuse_repository(repository_name)
        return [row for row in self.rows if row.state is ModelState.READY or not ready_only]

    async def load(
        self, name: str, parameters: dict[str, object], *, repository_name: str = "", version: int | None = None
    ) -> None:
        await self._do(
            "load", name, parameters if version is None else parameters | {"version": version}, repository_name
        )

    async def unload(
        self, name: str, parameters: dict[str, object], *, repository_name: str = "", version: int | None = None
    ) -> None:
        await self._do(
            "unload", name, parameters if version is None else parameters | {"version": version}, repository_name
        )

    async def _do(self, verb: str, name: str, parameters: dict[str, object], repository_name: str) -> None:
        await asyncio.sleep(0)
        _refuse_repository(repository_name)
        if self.refuses is not None:
            raise self.refuses
        self.asked.append((verb, name, parameters))


def _refuse_repository(name: str) -> None:
    if name:
        raise UnsupportedError(f"repository '{name}': naming one repository is not supported")

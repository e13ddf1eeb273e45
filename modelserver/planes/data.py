"""Where both protocols meet: inference, health, metadata and statistics over the repository's ready models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from modelserver.config.schema import ModelConfig
from modelserver.config.signature import TensorSpec
from modelserver.core.long_work import Result, long_work
from modelserver.core.request import CalledRequest, InFlightRequest, LoadedAdapter, RegionInput, RequestForm, Transfer
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor, placeholder
from modelserver.errors import (
    SHUTTING_DOWN,
    CancelledError,
    InternalError,
    InvalidArgumentError,
    LoadOnDemandError,
    ServerError,
    UnavailableError,
    UnloadedError,
)
from modelserver.execution.model import Model
from modelserver.planes.adapters import AdapterLoads
from modelserver.planes.on_demand import WaitingRequests
from modelserver.planes.quotas import Callers, OverloadStream, tell_overload
from modelserver.planes.shadow import Shadows
from modelserver.planes.shared_memory import AnyRegion, SharedMemory
from modelserver.planes.shared_memory_io import TransferStream, long_inputs, region_slices, resolve
from modelserver.platform.device_loss import device_loss
from modelserver.repository.namespaces import AmbiguousModelError
from modelserver.repository.repository import ModelRepository
from modelserver.store.store import Store
from modelserver.telemetry.access_log import LoggedStream, log_refusal, note_request
from modelserver.telemetry.audit import audited
from modelserver.telemetry.counts import RefusalCounts
from modelserver.telemetry.log_settings import LogSettings
from modelserver.telemetry.statistics_snapshot import StatisticsSnapshot
from modelserver.telemetry.trace_settings import Changes
from modelserver.telemetry.tracer import TracedStream, Tracer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name, version and the protocol extensions that this server offers."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output as metadata shows it: with the batch dimension, if there is one, as -1."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's name, ready versions, platform and tensors."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """How busy a model is now: requests in flight, those of them that wait, and instances that serve them.

    Of a language model also the share of its KV cache in use, 0 to 1, and the tokens for which the cache has room.
    """

    num_inflight: int
    queue_depth: int
    num_instances: int
    kv_cache_utilization: float | None = None
    max_token_capacity: int | None = None

    @property
    def utilization(self) -> float:
        """Requests in flight per instance; over 1 some wait."""
        return self.num_inflight / max(1, self.num_instances)


class InferPlane(Protocol):
    """The part of a data plane that inference needs; a front process's plane has only this part."""

    def infer(self, request: InFlightRequest) -> ResponseStream: ...

    def check_inputs(self, request: InFlightRequest) -> None: ...


def _kv_cache(model: Model) -> tuple[float | None, int | None]:
    """The use and the tokens of a language model's KV cache, by what it measures; of several instances the sum."""
    usages: list[float] = []
    capacity = 0
    for each in chain.from_iterable(model.measure() if model.measures else ()):
        if each.name == "vllm:kv_cache_usage_perc":
            usages.append(each.value)
        elif each.name == "vllm:cache_config_info":
            capacity += int(each.labels["num_gpu_blocks"]) * int(each.labels["block_size"])
    return (sum(usages) / len(usages), capacity) if usages and capacity else (None, None)


def _check_shapes(model: Model, request: InFlightRequest) -> None:
    """Compare a request with its model before inputs in shared memory are read. Raises InvalidArgumentError."""
    elsewhere = () if request.transfer is None else request.transfer.inputs
    shapes = {item.name: placeholder(item.name, item.datatype, item.shape) for item in elsewhere}
    model.signature.check(
        InFlightRequest(
            model_name=request.model_name,
            version=request.version,
            inputs=request.inputs | shapes,
            outputs=request.outputs,
        )
    )


def _check_form(model: Model, request: InFlightRequest, form: RequestForm) -> None:
    """Check the first request of a form, for all of it unless the inputs of each have to be adapted."""
    model.signature.check(request)
    if request.form is form:
        form.signature, form.rows = model.signature, request.rows


class DataPlane:
    """The calls by which a frontend answers a client. Every method is called from the event loop thread."""

    def __init__(
        self,
        repository: ModelRepository,
        metadata: ServerMetadata,
        *,
        strict_readiness: bool = True,
        logs_requests: bool = False,
        logs_access: bool = False,
        shared_memory: SharedMemory | None = None,
        tracer: Tracer | None = None,
        tells_overload: bool = False,
        callers: Callers | None = None,
    ) -> None:
        """`tells_overload`: a full queue and a timeout have error codes of their own. `callers` may have quotas."""
        self._repository = repository
        self._metadata = metadata
        self._strict_readiness = strict_readiness
        self._logs_requests = logs_requests
        self.tracer = tracer or Tracer()
        self._tells_overload = tells_overload
        self._callers = callers
        self.adapters = AdapterLoads()
        self.adapters.on_change = self._observe
        self._waiting = WaitingRequests(self.infer)
        self._traffic = repository.traffic
        self._splits = repository.traffic.splits  # looked at for each request, and mostly empty
        self._traffic.on_change = self._observe
        self._shadows = Shadows(self._traffic.counts)
        repository.on_demand.on_active = self._observe
        self._observe()
        # The access log learns of each call's inference requests.
        self.logs_access = logs_access
        self.is_shutting_down = False
        self._refuses_sequences = self._refuses_all = False
        self._called_at_shutdown: list[Callable[[], None]] = []
        self.refusals = RefusalCounts()
        self.shared_memory = shared_memory or SharedMemory()

    def infer(self, request: InFlightRequest) -> ResponseStream:
        """Check the request and hand it to its model; the stream brings the responses or the error.

        Raises ServerError for a request that is refused at once: unknown or unready model, a request that does not fit
        the config, a full queue, a server that is shutting down. A request for a model that is loaded on demand waits
        until it is, if its deadline allows.
        """
        if self.logs_access:
            note_request(request)
        try:
            model = None
            is_split = bool(self._splits) and request.version is None
            if request.sequence_id and not request.sequence_start:
                model = self._repository.sequence_holder(request.model_name, request.version, request.sequence_id)
            if model is None:
                if self.is_shutting_down and (self._refuses_all or (self._refuses_sequences and request.sequence_id)):
                    raise UnavailableError(f"{SHUTTING_DOWN} and accepts no new requests")
                version = self._choose(request) if is_split else request.version
                model = self._repository.get(request.model_name, version)
            request.version = model.version  # replies name the version that answers
            if model.is_decoupled:
                request.is_decoupled = True
            transfer = request.transfer
            gpu = None if transfer is None else self._shared_gpu(model)
            if transfer is not None and (items := long_inputs(model, transfer, self.shared_memory, gpu)):
                return self._read_regions(model, request, transfer, items)
            regions = () if transfer is None else resolve(request, transfer, self.shared_memory, gpu)
            form = request.form
            if form is None:
                model.signature.check(request)
            elif form.signature is model.signature:
                request.rows = form.rows
            else:
                _check_form(model, request, form)
        except LoadOnDemandError as unloaded:
            return self._waiting.wait(request, unloaded)
        except ServerError as error:
            self._note_refusal(request, error)
            raise
        if transfer is None and not self._is_observed:
            return model.submit(request)
        return self._submit_observed(model, request, regions, is_split=is_split)

    def _shared_gpu(self, model: Model) -> int | None:
        """The GPU whose registered memory the model uses in place. Tensors that may be traced come by the host."""
        return model.gpu if self.shared_memory.num_cuda_regions and not self.tracer.is_on else None

    def _read_regions(
        self, model: Model, request: InFlightRequest, transfer: Transfer, items: Sequence[RegionInput]
    ) -> ResponseStream:
        """As `infer`, for a request with inputs in shared memory that are decoded beside the event loop first."""
        _check_shapes(model, request)
        memory = self.shared_memory
        regions = [memory.find(item.place.region) for item in items]
        for item, region in zip(items, regions, strict=True):
            region.check(item.place.offset, item.place.num_bytes)
        memory.acquire(regions)

        def take(result: Result[dict[str, Tensor]]) -> None:
            memory.release(regions)
            error: ServerError
            try:
                request.inputs = request.inputs | result()
                request.transfer = transfer.without(items)
                if request.is_cancelled:
                    raise CancelledError(f"request to model '{request.model_name}' was cancelled")
                self.infer(request)
                return
            except ServerError as fault:
                error = fault
            except Exception as fault:
                _logger.exception("inputs in shared memory could not be read")
                error = InternalError(f"internal error: {type(fault).__name__}; the server's log has the details")
            request.stream.deliver(InferResponse(error=error))

        long_work().start(region_slices(request.model_name, items, regions), take)
        return request.stream

    def check_inputs(self, request: InFlightRequest) -> None:
        """Refuse a request before its elements, which take long to decode, are decoded; it has only their shapes.

        Raises ServerError as `infer` does. `infer` checks again, and checks whatever depends on more than the shapes.
        """
        name, version = request.model_name, request.version
        if request.sequence_id or (self._splits and version is None):
            return  # the version that answers may differ from the one served now
        try:
            _check_shapes(self._repository.get(name, version), request)
        except LoadOnDemandError:
            return
        except ServerError as error:
            self._note_refusal(request, error)
            raise

    def _note_refusal(self, request: InFlightRequest, error: ServerError) -> None:
        """Count a refusal, log it, and name the request in its error."""
        self.refusals.record(error.code)
        if self._logs_requests:
            log_refusal(request, error)
        error.name_request("", request.id)

    def _choose(self, request: InFlightRequest) -> int | None:
        """The version that answers where several share the requests; None: the highest."""
        return self._traffic.choose(request, self._repository.ready_versions(request.model_name))

    def _submit_observed(
        self, model: Model, request: InFlightRequest, regions: Sequence[AnyRegion], *, is_split: bool
    ) -> ResponseStream:
        """As `Model.submit`, with the parts that see or change responses placed before the reader."""
        reader = request.stream
        transfer = request.transfer
        request.adapters += self.adapters.of(model.name)
        is_call = isinstance(request, CalledRequest)
        give_back = self._admit(request) if self._callers is not None and not is_call else None
        request.arrival_ns = time.monotonic_ns()  # else the scheduler says so, after log and trace have begun
        model.last_use_ns = request.arrival_ns
        shadows = self._shadows_of(model, request) if is_split else []
        watched = self._shadows.watch(request) if shadows else None
        moving = None if transfer is None else TransferStream(request, transfer, model, regions, self.shared_memory)
        if moving is not None:
            request.stream = moving
        trace = self.tracer.sample(model.name, request.trace_parent, is_call=is_call) if self.tracer.is_on else None
        if trace is not None:
            model.statistics.is_traced = True
            request.stream = TracedStream(request, trace, self.tracer, reader.protocol)
        if self._tells_overload:
            request.stream = OverloadStream(request.stream)
        if self._logs_requests:
            request.stream = LoggedStream(request)
        try:
            model.submit(request)
        except ServerError as error:
            if self._logs_requests:
                log_refusal(request, error)
            if moving is not None:
                moving.release()
            if give_back is not None:
                give_back()
            if self._tells_overload:
                raise tell_overload(error) from None
            raise
        if watched is not None:
            for shadow, tolerance in shadows:
                self._shadows.copy(request, watched, shadow, tolerance)
        return reader

    def _shadows_of(self, model: Model, request: InFlightRequest) -> list[tuple[Model, float]]:
        """The versions that get a copy of the request, and how exactly their answers are compared.

        Requests with shared memory, which a client may change meanwhile, and requests of sequences are not copied.
        """
        split = self._traffic.splits.get(model.name)
        if split is None or request.transfer is not None or request.sequence_id:
            return []
        versions = split.shadows(self._repository.ready_versions(model.name), model.version)
        return [(self._repository.get(model.name, version), split.traffic.tolerance) for version in versions]

    def _admit(self, request: InFlightRequest) -> Callable[[], None]:
        """As `Callers.admit`; a refusal is counted and logged."""
        assert self._callers is not None, "the caller of this has looked"
        try:
            return self._callers.admit(request)
        except ServerError as error:
            self.refusals.record(error.code)
            if self._logs_requests:
                log_refusal(request, error)
            raise

    def follow_logs(self, settings: LogSettings) -> None:
        """Turn the line per request on or off from now on."""
        self._logs_requests = settings.log_verbose_level > 0
        self._observe()

    def _observe(self) -> None:
        """Find out whether anything must be placed before the readers of responses."""
        self._is_observed = (
            self._logs_requests
            or self.tracer.is_on
            or self._tells_overload
            or self._callers is not None
            or self._repository.on_demand.is_active
            or self._traffic.has_shadows
            or bool(self.adapters.by_model)
        )

    def trace_settings(self, model_name: str = "") -> Mapping[str, str | list[str]]:
        """Of the server, or of a model. Raises InvalidArgumentError for an unknown model."""
        self._check_traced_model(model_name)
        return self.tracer.settings(model_name)

    def update_trace_settings(self, changes: Changes, model_name: str = "") -> Mapping[str, str | list[str]]:
        """Change some settings and return all. Raises ServerError as `Tracer.update` and `trace_settings` do."""
        with audited("trace settings", model_name):
            self._check_traced_model(model_name)
            settings = self.tracer.update(changes, model_name)
        self._observe()
        return settings

    def recent_traces(self) -> list[dict[str, Any]]:
        """As `Tracer.recent`."""
        return self.tracer.recent()

    def _check_traced_model(self, name: str) -> None:
        if name and all(entry.name != name for entry in self._repository.index()):
            raise InvalidArgumentError(f"Request for unknown model : {name}")

    @property
    def is_live(self) -> bool:
        """Whether the process serves at all; it does not depend on models. False when it has lost its GPU: only another
        process can use that again."""
        return not device_loss()

    @property
    def is_ready(self) -> bool:
        """Whether inference may be sent: false while loading, while shutting down, and, with strict
        readiness, while any model that should be ready is not."""
        return self.is_live and not self.is_shutting_down and self._repository.is_ready(strict=self._strict_readiness)

    def readiness_state(self) -> str:
        """`starting`, `ready`, `degraded` (it serves, but for a model that should be ready), or `stopping`."""
        if self.is_shutting_down:
            return "stopping"
        if not self._repository.is_ready(strict=False):
            return "starting"
        return "ready" if self.is_ready else "degraded"

    def unready_because(self) -> list[str]:
        """A sentence for each thing for which `is_ready` is false; empty when it is true."""
        if self.is_shutting_down:
            return [SHUTTING_DOWN]
        if not self.is_live:
            return [f"this process has lost its GPU ({device_loss()}): start it again"]
        return self._repository.unready_because(strict=self._strict_readiness)

    def begin_drain(self) -> None:
        """Readiness falls; everything else continues."""
        self.is_shutting_down = True

    def end_sequences(self) -> None:
        """New sequences are refused, as they could outlive the drain; existing sequences continue."""
        self._refuses_sequences = True

    def begin_shutdown(self) -> None:
        """Readiness falls and new inference is refused; accepted requests continue."""
        self.is_shutting_down = self._refuses_all = True
        self._waiting.close()
        for function in self._called_at_shutdown:
            function()

    def call_at_shutdown(self, function: Callable[[], None]) -> None:
        """Call it when the ports are closed, before requests in flight are waited for: to end what no client waits
        for."""
        self._called_at_shutdown.append(function)

    def model_is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether the model can answer now, or after it is loaded on demand.

        Raises NotFoundError for an unknown model or version.
        """
        try:
            model = self._repository.get(name, version)
        except LoadOnDemandError:
            return self._repository.on_demand.can_load(name, version)
        except (UnavailableError, UnloadedError, AmbiguousModelError):
            return False
        return model.is_ready()

    def load_of(self, name: str, version: int | None = None) -> ModelLoad:
        """How busy a model is. Raises as `infer` does for unknown or unready models."""
        model = self._repository.get(name, version)
        usage, capacity = _kv_cache(model)
        return ModelLoad(model.inflight, model.queue_depth, len(model.instances()), usage, capacity)

    def num_inflight(self) -> int:
        """The requests that models have in hand, queued ones too; an ensemble's steps count, and it does not."""
        return sum(model.inflight for model in self._repository.models() if not model.is_ensemble)

    def model_names(self) -> list[str]:
        """The models that have a ready version."""
        return sorted({model.name for model in self._repository.models()})

    async def unloaded_configs(self) -> list[ModelConfig]:
        """The configs of models that are loaded on demand, as far as they are known before the load; in no order."""
        return await self._repository.unloaded_configs()

    def server_metadata(self) -> ServerMetadata:
        return self._metadata

    def model_metadata(self, name: str, version: int | None = None) -> ModelMetadata:
        """Raises as `infer` does for unknown or unready models."""
        model = self._repository.get(name, version)
        versions = self._repository.ready_versions(name) if version is None else (version,)
        config = model.config
        batched = config.max_batch_size > 0
        return ModelMetadata(
            name=name,
            versions=tuple(str(number) for number in versions),
            platform=config.platform or config.backend,
            inputs=_describe(model.signature.inputs.values(), batched=batched),
            outputs=_describe(model.signature.outputs.values(), batched=batched),
        )

    def model_config(self, name: str, version: int | None = None) -> ModelConfig:
        """The complete, normalised config that the model runs with."""
        return self._repository.get(name, version).config

    def adapters_of(self, name: str) -> tuple[LoadedAdapter, ...]:
        """The model's adapters that were loaded while it serves."""
        return self.adapters.of(name)

    def model_directories(self, name: str) -> tuple[Path, ...]:
        """Of the newest ready version of the model, or of the one that a request would load; then that of the model."""
        return self._repository.directories(name)

    def store_of(self, name: str) -> Store | None:  # noqa: ARG002 - access is checked by the model
        """The model store, which may have a model of that name; None for a server without one."""
        return self._repository.store

    def statistics(self, name: str = "", version: int | None = None) -> list[tuple[Model, StatisticsSnapshot]]:
        """Statistics since load, or the last reset: of one model (all its ready versions, or one), or of all.

        Raises as `infer` does for unknown or unready models.
        """
        return [(model, model.statistics.since_reset()) for model in self._ready_models(name, version)]

    def reset_statistics(self, name: str = "", version: int | None = None) -> None:
        """Reset `statistics`; metrics continue. Raises as `statistics` does."""
        with audited("reset statistics", name):
            for model in self._ready_models(name, version):
                model.statistics.reset()

    def _ready_models(self, name: str, version: int | None) -> list[Model]:
        try:
            return self._named_models(name, version)
        except LoadOnDemandError as unloaded:  # statistics alone do not justify loading a model
            raise UnavailableError(unloaded.message) from None
        except ServerError as error:
            is_served = version is not None and bool(self._repository.ready_versions(name))
            what = f"version is not available for model '{name}'" if is_served else f"'{name}' is not available"
            error.message = f"requested model {what}: {error.message}"
            raise

    def _named_models(self, name: str, version: int | None) -> list[Model]:
        if not name:
            return list(self._repository.models())
        if version is None:
            numbers = self._repository.ready_versions(name)
            return [self._repository.get(name, number) for number in numbers or (None,)]
        return [self._repository.get(name, version)]


def _describe(specs: Iterable[TensorSpec], *, batched: bool) -> tuple[TensorMetadata, ...]:
    lead = (-1,) if batched else ()
    return tuple(
        TensorMetadata(spec.name, spec.datatype.value, spec.dims if spec.is_shape else lead + spec.dims)
        for spec in specs
    )

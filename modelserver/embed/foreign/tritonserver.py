"""Triton's in-process Python API (`tritonserver`) over a server inside the program.

The models of a repository are asked without sockets, by the names that programs for Triton have. Inputs and outputs are
tensors that other libraries read by DLPack. Logs go to Python's `logging`, as the program configures it, unless the
options say where.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import queue
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from modelserver import errors
from modelserver.app.logs import LogWriter, start_logs
from modelserver.config.message import config_to_json
from modelserver.core.long_work import finish
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.embed import server as embedded
from modelserver.embed.foreign import program, tritonserver_metrics
from modelserver.embed.foreign.tritonserver_metrics import Metric, MetricFamily, MetricKind
from modelserver.embed.foreign.tritonserver_tensor import (
    AlreadyExistsError,
    DataType,
    DeviceOrMemoryType,
    DLDeviceType,
    InternalError,
    InvalidArgumentError,
    MemoryBuffer,
    MemoryType,
    NotFoundError,
    Tensor,
    TritonError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
    parse_device,
    translated,
)
from modelserver.frontends.http.documents import (
    index_document,
    model_document,
    server_document,
    statistics_document,
)
from modelserver.options.server_options import ServerOptions
from modelserver.telemetry.exposition import text_slices
from modelserver.telemetry.metrics import add_families_of_models

if TYPE_CHECKING:
    from modelserver.app.server import Server as RunningServer

__all__ = [
    "AlreadyExistsError",
    "DLDeviceType",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InstanceGroupKind",
    "InternalError",
    "InvalidArgumentError",
    "LogFormat",
    "MemoryBuffer",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricFormat",
    "MetricKind",
    "Model",
    "ModelBatchFlag",
    "ModelControlMode",
    "ModelLoadDeviceLimit",
    "ModelTxnPropertyFlag",
    "NotFoundError",
    "Options",
    "RateLimitMode",
    "RateLimiterResource",
    "Server",
    "Tensor",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
]

Result = TypeVar("Result")
# Flags of a request.
_SEQUENCE_START, _SEQUENCE_END = 1, 2
_CACHE_OF_TRITON = "/opt/tritonserver/"
_NOT_STARTED = "Server not started"


class ModelControlMode(enum.IntEnum):
    NONE = 0
    POLL = 1
    EXPLICIT = 2


class RateLimitMode(enum.IntEnum):
    OFF = 0
    EXEC_COUNT = 1


class LogFormat(enum.IntEnum):
    DEFAULT = 0
    ISO8601 = 1


class MetricFormat(enum.IntEnum):
    PROMETHEUS = 0


class InstanceGroupKind(enum.IntEnum):
    AUTO = 0
    CPU = 1
    GPU = 2
    MODEL = 3


class ModelBatchFlag(enum.IntFlag):
    UNKNOWN = 1
    FIRST_DIM = 2


class ModelTxnPropertyFlag(enum.IntFlag):
    ONE_TO_ONE = 1
    DECOUPLED = 2


@dataclass(slots=True)
class RateLimiterResource:
    name: str
    count: int
    device: int


@dataclass(slots=True)
class ModelLoadDeviceLimit:
    kind: InstanceGroupKind
    device: int
    fraction: float


@dataclass(slots=True)
class Options:
    """The options of a server. Those of memory pools and of Triton's own threads have no effect.

    If an option of logs is set, the server's log goes to `log_file`, or else to stderr, with the levels that are on.
    """

    model_repository: str | list[str] = field(default_factory=list)
    server_id: str = "triton"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: list[str] = field(default_factory=list)
    strict_model_config: bool = False
    rate_limiter_mode: RateLimitMode = RateLimitMode.OFF
    rate_limiter_resources: list[RateLimiterResource] = field(default_factory=list)
    pinned_memory_pool_size: int = 1 << 28
    cuda_memory_pool_sizes: dict[int, int] = field(default_factory=dict)
    cache_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache_directory: str = f"{_CACHE_OF_TRITON}caches"
    min_supported_compute_capability: float = 0.0
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout: int = 30
    buffer_manager_thread_count: int = 0
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_namespacing: bool = False
    enable_peer_access: bool = True
    log_file: str | None = None
    log_info: bool = False
    log_warn: bool = False
    log_error: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    metrics: bool = True
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    metrics_interval: int = 2000
    backend_directory: str = f"{_CACHE_OF_TRITON}backends"
    repo_agent_directory: str = f"{_CACHE_OF_TRITON}repoagents"
    model_load_device_limits: list[ModelLoadDeviceLimit] = field(default_factory=list)
    backend_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    host_policies: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics_configuration: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def has_logs(self) -> bool:
        """Whether an option of logs is set."""
        return any((self.log_file, self.log_info, self.log_warn, self.log_error, self.log_verbose, self.log_format))

    def server(self) -> embedded.Server:
        """A server without ports. Raises TypeError and InvalidArgumentError for values that are no options."""
        if self.model_repository is None:
            raise InvalidArgumentError("Model repository must be specified.")
        paths = self.model_repository if isinstance(self.model_repository, list) else [self.model_repository]
        if not isinstance(self.server_id, str) or not all(isinstance(path, str) for path in paths):
            raise TypeError("server_id and model_repository are texts")
        if missing := [path for path in paths if "://" not in path and not Path(path).exists()]:
            raise InternalError(f"failed to stat file {missing[0]}: the model repository does not exist")
        limits, resources = self.model_load_device_limits, self.rate_limiter_resources
        try:
            return embedded.Server(
                paths,
                ports=False,
                id=self.server_id,
                model_control_mode=self.model_control_mode.name.lower(),
                load_model=tuple(self.startup_models),
                disable_auto_complete_config=self.strict_model_config,
                rate_limit="off" if self.rate_limiter_mode is RateLimitMode.OFF else "execution_count",
                rate_limit_resource=tuple(f"{each.name}:{each.count}:{each.device}" for each in resources),
                cache_config=_settings(self.cache_config),
                min_supported_compute_capability=self.min_supported_compute_capability,
                exit_on_error=self.exit_on_error,
                strict_readiness=self.strict_readiness,
                exit_timeout_secs=self.exit_timeout,
                model_load_thread_count=self.model_load_thread_count,
                model_load_retry_count=self.model_load_retry_count,
                model_namespacing=self.model_namespacing,
                log_verbose=int(self.log_verbose),
                **(self._logs() if self.has_logs else {}),
                allow_cpu_metrics=self.cpu_metrics,
                allow_gpu_metrics=self.gpu_metrics,
                metrics_interval_ms=self.metrics_interval,
                backend_directory=tuple(_own(self.backend_directory)),
                repoagent_directory="".join(_own(self.repo_agent_directory)),
                model_load_gpu_limit=tuple(f"{each.device}:{each.fraction}" for each in limits),
                backend_config=_settings(self.backend_configuration),
                host_policy=_settings(self.host_policies),
                metrics_config=tuple(
                    f"{name},{key}={value}" if name else f"{key}={value}"
                    for name, settings in self.metrics_configuration.items()
                    for key, value in settings.items()
                ),
            )
        except errors.ServerError as error:
            raise translated(error) from error

    def _logs(self) -> dict[str, Any]:
        return {
            "log_file": self.log_file or "",
            "log_info": self.log_info,
            "log_warning": self.log_warn,
            "log_error": self.log_error,
            "log_format": "ISO8601" if self.log_format is LogFormat.ISO8601 else "default",
        }


def _settings(settings: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(f"{name},{key}={value}" for name, own in settings.items() for key, value in own.items())


def _own(directory: str) -> list[str]:
    """A directory, unless it is where Triton's own lies by default."""
    return [directory] if directory and not directory.startswith(_CACHE_OF_TRITON) else []


@dataclass
class InferenceRequest:
    """A request for `model`. `inputs` are tensors, arrays of any library with DLPack, lists, texts or numbers.

    `timeout` is in microseconds. `output_memory_type` is where outputs are wanted. Each response is also put into
    `response_queue`.
    """

    model: Model
    request_id: str | None = None
    flags: int = 0
    correlation_id: int | str | None = None
    priority: int = 0
    timeout: int = 0
    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str | int | bool | float] = field(default_factory=dict)
    output_memory_type: DeviceOrMemoryType | None = None
    response_queue: queue.SimpleQueue[InferenceResponse] | asyncio.Queue[InferenceResponse] | None = None

    def made(self) -> Callable[[ResponseStream], InFlightRequest]:
        """How the request is made, with a stream for its responses. Raises InvalidArgumentError."""
        for name, value in self.parameters.items():
            if not isinstance(value, str | int | bool | float):
                raise InvalidArgumentError(f"parameter '{name}': a {type(value).__name__} cannot be sent")
        if self.output_memory_type is not None:
            parse_device(self.output_memory_type)
        tensors = {name: Tensor.of(value).core(name) for name, value in self.inputs.items()}
        version = self.model.version if self.model.version > 0 else None
        return lambda stream: InFlightRequest(
            model_name=self.model.name,
            version=version,
            inputs=tensors,
            id=self.request_id or "",
            parameters=dict(self.parameters),
            priority=self.priority,
            timeout_us=self.timeout,
            sequence_id=self.correlation_id or 0,
            sequence_start=bool(self.flags & _SEQUENCE_START),
            sequence_end=bool(self.flags & _SEQUENCE_END),
            stream=stream,
        )


@dataclass
class InferenceResponse:
    """A response; the one with `final` is the last of its request, and of a decoupled model has no outputs."""

    model: Model
    request_id: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: TritonError | None = None
    classification_label: str | None = None
    final: bool = False


class _Responses(abc.ABC):
    """The responses to a request, as they come."""

    def __init__(self, request: InferenceRequest, raises: bool) -> None:
        self._request = request
        self._raises = raises
        self._is_complete = False
        # While the server answers it.
        self._sent: InFlightRequest | None = None

    @abc.abstractmethod
    def _deliver(self, response: InferenceResponse) -> None:
        """Called for each response, on the server's loop."""

    def send(self) -> Self:
        """Have the server answer. Raises TritonError if it refuses."""
        make = self._request.made()
        running = self._request.model.server

        async def ask(server: RunningServer) -> None:
            for is_again in (False, True):
                stream = ResponseStream()
                request = self._sent = make(stream)
                stream.subscribe(self._take)
                try:
                    server.dataplane.infer(request)
                except errors.LoadOnDemandError as unloaded:
                    if is_again:
                        raise
                    await unloaded.load()
                else:
                    return

        running.perform(ask)
        return self

    def cancel(self) -> None:
        """Tell the server that the answer is not wanted any more."""

        def cancel(_server: RunningServer) -> None:
            if self._sent is not None:
                self._sent.cancel()

        self._request.model.server.ask(cancel)

    def _take(self, response: InferResponse) -> None:
        if response.is_final:
            self._sent = None
        self._deliver(self._read(response))

    def _read(self, response: InferResponse) -> InferenceResponse:
        request = self._request
        made = InferenceResponse(
            request.model, request.request_id, dict(response.parameters or {}), final=response.is_final
        )
        if response.error is not None:
            made.error = translated(response.error)
            return made
        try:
            made.outputs = {tensor.name: Tensor.of_core(tensor) for tensor in response.outputs}
            if request.output_memory_type is not None:
                wanted = request.output_memory_type
                made.outputs = {name: tensor.to_device(wanted) for name, tensor in made.outputs.items()}
        except UnsupportedError as error:
            made.error = InvalidArgumentError(f"Memory type {request.output_memory_type} not supported: {error}")
        return made

    def _returned(self, response: InferenceResponse) -> InferenceResponse:
        self._is_complete = response.final
        if response.error is not None and self._raises:
            raise response.error
        return response


class ResponseIterator(_Responses):
    """The responses to a request; to read the next one waits for it."""

    def __init__(self, request: InferenceRequest, raises: bool) -> None:
        self._queue: queue.SimpleQueue[InferenceResponse] = queue.SimpleQueue()
        self._theirs = request.response_queue
        super().__init__(request, raises)

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_complete:
            raise StopIteration
        return self._returned(self._queue.get())

    def _deliver(self, response: InferenceResponse) -> None:
        self._queue.put(response)
        if self._theirs is not None:
            cast("queue.SimpleQueue[InferenceResponse]", self._theirs).put(response)


class AsyncResponseIterator(_Responses):
    """The responses to a request, for `async for` on the event loop that it was made on."""

    def __init__(self, request: InferenceRequest, raises: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[InferenceResponse] = asyncio.Queue()
        self._theirs = request.response_queue
        super().__init__(request, raises)

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._is_complete:
            raise StopAsyncIteration
        return self._returned(await self._queue.get())

    def _deliver(self, response: InferenceResponse) -> None:
        for each in (self._queue, self._theirs):
            if each is not None:
                self._loop.call_soon_threadsafe(each.put_nowait, response)


class Model:
    """A model of a started server; `version` -1 is the one that its version policy serves."""

    def __init__(
        self, server: Server, name: str, version: int = -1, state: str | None = None, reason: str | None = None
    ) -> None:
        self.server = server
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def create_request(self, **fields: Any) -> InferenceRequest:
        """A request with these fields, for `infer`."""
        return InferenceRequest(model=self, **fields)

    def infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **fields: Any
    ) -> ResponseIterator:
        """Ask the model. Without a request, `fields` are those of one. Raises TritonError if the server refuses it."""
        request = inference_request or self.create_request(**fields)
        return ResponseIterator(request, raise_on_error).send()

    def async_infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **fields: Any
    ) -> AsyncResponseIterator:
        """As `infer`, on an event loop."""
        request = inference_request or self.create_request(**fields)
        return AsyncResponseIterator(request, raise_on_error).send()

    def metadata(self) -> dict[str, Any]:
        return self.server.ask(lambda it: model_document(it.dataplane.model_metadata(self.name, self._version)))

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """The completed config. Raises UnsupportedError for another version of its form than 1."""
        if config_version != 1:
            raise UnsupportedError(f"model configuration version {config_version} not supported, supported is: 1")
        return self.server.ask(lambda it: config_to_json(it.dataplane.model_config(self.name, self._version)))

    def statistics(self) -> dict[str, Any]:
        return self.server.ask(lambda it: statistics_document(it.dataplane.statistics(self.name, self._version)))

    def ready(self) -> bool:
        return self.server.ask(lambda it: it.dataplane.model_is_ready(self.name, self._version))

    def batch_properties(self) -> ModelBatchFlag:
        return ModelBatchFlag.FIRST_DIM if self.config().get("max_batch_size", 0) else ModelBatchFlag.UNKNOWN

    def transaction_properties(self) -> ModelTxnPropertyFlag:
        is_decoupled = self.config().get("model_transaction_policy", {}).get("decoupled", False)
        return ModelTxnPropertyFlag.DECOUPLED if is_decoupled else ModelTxnPropertyFlag.ONE_TO_ONE

    @property
    def _version(self) -> int | None:
        return self.version if self.version > 0 else None

    def __repr__(self) -> str:
        return str({"name": self.name, "version": self.version, "state": self.state})


class ModelDictionary(dict[Any, Model]):
    """Models by (name, version); a name alone finds the version that its policy serves. Raises KeyError."""

    def __init__(self, server: Server, models: list[Model]) -> None:
        super().__init__({(model.name, model.version): model for model in models})
        self._server = server

    def __missing__(self, key: Any) -> Model:
        if isinstance(key, str) and any(name == key for name, _ in self):
            return Model(self._server, key)
        raise KeyError(f"Unknown Model: {key}")


class Server:
    """A server in this program. Options are given whole, or by their names."""

    def __init__(self, options: Options | None = None, **fields: Any) -> None:
        self.options = Options(**fields) if options is None else options
        self._server: embedded.Server | None = None
        self._logs: LogWriter | None = None

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Server:
        """Start and load the models; returns when each is loaded, or has failed.

        Raises TypeError and InvalidArgumentError for the options, UnavailableError if the server is not ready after
        `timeout` seconds and `wait_until_ready` is set, and InternalError if a model fails and `exit_on_error` is set.
        """
        if self._server is not None:
            raise InvalidArgumentError("Server already started")
        server = self.options.server()
        program.note_served()
        began_s = time.monotonic()
        try:
            if self.options.has_logs:
                self._logs = start_logs(ServerOptions(**server.options), takes_all=False)
            self._server = server.start()
        except errors.ServerError as error:
            raise translated(error) from error
        finally:
            if self._server is None:
                self._end_logs()
        while wait_until_ready and not self.ready():
            if timeout is not None and time.monotonic() - began_s > timeout:
                raise UnavailableError("Timeout before ready")
            time.sleep(polling_interval)
        return self

    def stop(self) -> None:
        """Answer the requests that were received and end. Raises InvalidArgumentError if it was not started."""
        try:
            self._started().stop()
        finally:
            self._server = None
            self._end_logs()

    def live(self) -> bool:
        return self.ask(lambda it: it.dataplane.is_live)

    def ready(self) -> bool:
        return self.ask(lambda it: it.dataplane.is_ready)

    def metadata(self) -> dict[str, Any]:
        return self.ask(lambda it: server_document(it.dataplane.server_metadata()))

    def model(self, model_name: str, model_version: int = -1) -> Model:
        self._started()
        return Model(self, model_name, model_version)

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        rows = self.ask(lambda it: index_document(it.controlplane.index(exclude_not_ready)))
        return ModelDictionary(
            self,
            [
                Model(self, row["name"], int(row.get("version", -1)), row.get("state"), row.get("reason"))
                for row in rows
            ],
        )

    def load(self, model_name: str, parameters: Mapping[str, str | int | bool | bytes] | None = None) -> Model:
        """Load a model, with ModelControlMode.EXPLICIT: `config` and `file:...` replace what lies in the repository."""
        self.perform(lambda it: it.controlplane.load(model_name, parameters))
        return self.model(model_name)

    def unload(
        self,
        model: str | Model,
        unload_dependents: bool = False,
        wait_until_unloaded: bool = False,
        polling_interval: float = 0.1,
        timeout: float | None = None,
    ) -> None:
        """Unload a model, with ModelControlMode.EXPLICIT; `timeout` is in seconds."""
        name = model if isinstance(model, str) else model.name
        self.perform(lambda it: it.controlplane.unload(name, {"unload_dependents": unload_dependents}))
        began_s = time.monotonic()
        while wait_until_unloaded and (timeout is None or time.monotonic() - began_s < timeout):
            if all(each.state in (None, "UNAVAILABLE") for each in self.models().values() if each.name == name):
                return
            time.sleep(polling_interval)

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """The page of metrics, the program's own included.

        Raises UnsupportedError for another form than Prometheus', or if metrics are off.
        """
        if metric_format is not MetricFormat.PROMETHEUS or not self.options.metrics:
            raise UnsupportedError("metrics are off" if not self.options.metrics else f"no form {metric_format}")
        families = self.ask(lambda it: it.metrics().collect())
        add_families_of_models(families, tritonserver_metrics.families())
        return b"".join(finish(text_slices(families))).decode()

    def register_model_repository(self, repository_path: str, name_mapping: Mapping[str, str] | None = None) -> None:
        """Add a repository, with ModelControlMode.EXPLICIT; its models are there to be loaded.

        `name_mapping` has other names for models, by their directories. Raises UnsupportedError for other modes,
        AlreadyExistsError for a repository that is there and for a name that two directories would have, and
        InvalidArgumentError for a path or a directory that is not there.
        """
        self.perform(lambda it: it.repository.register(repository_path, name_mapping))

    def unregister_model_repository(self, repository_path: str) -> None:
        """Take away a repository, also one of the options, and unload its models; returns when they have answered.

        With ModelControlMode.EXPLICIT. Raises UnsupportedError for other modes, InvalidArgumentError for a path that
        is not registered.
        """
        self.perform(lambda it: it.repository.unregister(repository_path))

    def poll_model_repository(self) -> None:
        """Has no effect: with ModelControlMode.POLL the server looks for changes by itself."""
        self._started()

    # For models and requests.

    def perform(self, work: Callable[[RunningServer], Coroutine[Any, Any, Result]]) -> Result:
        """The result of a coroutine on the server's loop. Raises TritonError."""
        future: Future[Result] = self._started().perform(work)
        try:
            return future.result()
        except errors.ServerError as error:
            raise translated(error) from error

    def ask(self, question: Callable[[RunningServer], Result]) -> Result:
        """What the server's planes say. Raises TritonError."""

        async def answer(server: RunningServer) -> Result:
            return question(server)

        return self.perform(answer)

    def _end_logs(self) -> None:
        logs, self._logs = self._logs, None
        if logs is not None:
            logs.close()

    def _started(self) -> embedded.Server:
        if self._server is None:
            raise InvalidArgumentError(_NOT_STARTED)
        return self._server

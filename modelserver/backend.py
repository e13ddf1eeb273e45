"""The contract between the server and a backend: all that a backend author imports.

A backend executes models of one framework. Its package (`backends/<name>/`, a directory under
`--backend-directory`, or an entry point in the group `modelserver.backends`) holds a module-level name
`BACKEND`: a subclass of `Backend`. The server makes one `Backend` per loaded model version and one
instance per placement; it owns every thread and queue, checks requests before they arrive, and calls
an instance from one thread at a time. `docs/backends.md` builds one step by step.
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from modelserver.config.completion import FileSignature, FileTensor, check, complete
from modelserver.config.hidden_tensors import model_inputs, model_outputs
from modelserver.config.schema import (
    InstanceGroupKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelTransactionPolicy,
)
from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.response import RESCHEDULE, InferResponse
from modelserver.core.sender import ResponseSender
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.device_memory import DeviceMemory, Reservation, device_memory
from modelserver.diagnosis import Finding, FindingLevel
from modelserver.errors import (
    CancelledError,
    ConfigError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.gpus import free_gpu_bytes, visible_gpus
from modelserver.telemetry.measurement import Measurement

__all__ = [
    "RESCHEDULE",
    "Answers",
    "AnyInstance",
    "Array",
    "Backend",
    "BackendContext",
    "BatchInstance",
    "CancelledError",
    "ConfigError",
    "Datatype",
    "DeviceKind",
    "DeviceMemory",
    "FileSignature",
    "FileTensor",
    "Finding",
    "FindingLevel",
    "InferRequest",
    "InferResponse",
    "Instance",
    "InstanceGroupKind",
    "InternalError",
    "InvalidArgumentError",
    "Measurement",
    "ModelConfig",
    "ModelDynamicBatching",
    "ModelInput",
    "ModelInstanceGroup",
    "ModelMetrics",
    "ModelOutput",
    "ModelTransactionPolicy",
    "NotFoundError",
    "Placement",
    "Reservation",
    "ResponseSender",
    "ResponseStream",
    "ServerCalls",
    "ServerError",
    "StepInstance",
    "Tensor",
    "TensorInstance",
    "UnavailableError",
    "UnsupportedError",
    "always",
    "device_memory",
    "free_gpu_bytes",
    "model_inputs",
    "model_outputs",
    "visible_gpus",
]

Array = np.ndarray[Any, Any]

_DEFAULT_MAX_BATCH_SIZE = 4
_BOOLS = {
    word: value for value, words in ((True, "true 1 yes on"), (False, "false 0 no off")) for word in words.split()
}


class DeviceKind(enum.Enum):
    """Where an instance runs; the values are `instance_group.kind` without the decision AUTO."""

    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class Placement:
    """One place for one instance: device kind, device id (0 on a CPU) and the instance's name."""

    name: str
    kind: DeviceKind = DeviceKind.CPU
    device_id: int = 0
    index: int = 0


def always() -> bool:
    """What is wanted for as long as it takes."""
    return True


class ModelMetrics(Protocol):
    """Metrics that models make themselves. Called on the event loop thread."""

    def ask(self, owner: object, topic: str, arguments: Mapping[str, Any]) -> Any:
        """Make, change or read a metric for a process (`owner`). Raises ServerError."""

    def forget(self, owner: object) -> None:
        """Drop what only this process still holds."""


class ServerCalls(Protocol):
    """What a backend may ask of the server that its models are in. All on the thread of `loop`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def metrics(self) -> ModelMetrics: ...

    def infer(self, request: InferRequest) -> ResponseStream:
        """Let another model, or the same, answer a request. Raises ServerError when it is refused at once."""

    async def ask(self, topic: str, arguments: Mapping[str, Any]) -> Any:
        """`load_model`, `unload_model` or `is_model_ready`. Raises ServerError."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is told about the model version it is to serve.

    `options` are the `--backend-config <backend>,key=value` pairs, defaults of the server included.
    `model_directory` holds config.pbtxt; `version_directory` holds the model's files. `namespace` is the path of
    its repository with `--model-namespacing`, else empty. `batch_strategy` is the model's own code
    that forms batches. `server` is None where there is none around, as in `modelserver check`. `is_uploaded`: the
    files came with the request that loads them, so that nothing in them, nor in the config, is the operator's word.
    `is_wanted` is asked by a load that takes minutes, from any thread: once it says False (the model is to be
    unloaded, the server stops), the load ends by UnavailableError as soon as it can.
    """

    model_name: str
    version: int
    config: ModelConfig
    model_directory: Path
    version_directory: Path
    options: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
    batch_strategy: Path | None = None
    server: ServerCalls | None = None
    is_uploaded: bool = False
    is_wanted: Callable[[], bool] = field(default=always, compare=False)

    def parameter(self, key: str, default: str = "") -> str:
        """The string value of `parameters { key: ... }` in the model's config."""
        return self.config.parameters.get(key, default)

    def int_parameter(self, key: str, default: int = 0) -> int:
        """`parameter` as a whole number. Raises ConfigError if it is none."""
        text = self.parameter(key).strip()
        try:
            return int(text) if text else default
        except ValueError:
            raise self._parameter_error(key, "a whole number", text) from None

    def float_parameter(self, key: str, default: float = 0.0) -> float:
        """`parameter` as a number. Raises ConfigError if it is none."""
        text = self.parameter(key).strip()
        try:
            return float(text) if text else default
        except ValueError:
            raise self._parameter_error(key, "a number", text) from None

    def bool_parameter(self, key: str, default: bool = False) -> bool:
        """`parameter` as true, false, 1, 0, yes, no, on or off. Raises ConfigError if it is none of them."""
        text = self.parameter(key).strip()
        if not text:
            return default
        if text.lower() not in _BOOLS:
            raise self._parameter_error(key, "true or false", text)
        return _BOOLS[text.lower()]

    def int_option(self, key: str, default: int = 0) -> int:
        """A `--backend-config` setting as a whole number, 0 or more. Raises ConfigError if it is none."""
        text = self.options.get(key, "").strip()
        if text and not text.isdecimal():
            flag = f"--backend-config={self.config.backend},{key}"
            raise ConfigError(f"{flag}: expected a whole number of 0 or more, got '{text}'")
        return int(text) if text else default

    def complete_config(self, signature: FileSignature) -> ModelConfig:
        """The config with what a model's file says filled in; for `Backend.complete_config`.

        A file that can batch without telling how much gets the setting `default-max-batch-size` (4). Raises
        ConfigError with every line of the config that the file contradicts.
        """
        default_max_batch_size = self.int_option("default-max-batch-size", _DEFAULT_MAX_BATCH_SIZE)
        source = str(self.model_directory / "config.pbtxt")
        return complete(self.config, signature, default_max_batch_size=default_max_batch_size, source=source)

    def check_config(self, signature: FileSignature) -> None:
        """Raise ConfigError if a model's file contradicts the config; for `Backend.load`."""
        check(self.config, signature, source=str(self.model_directory / "config.pbtxt"))

    def _parameter_error(self, key: str, expected: str, got: str) -> ConfigError:
        return ConfigError(f"model '{self.model_name}': parameter {key}: expected {expected}, got '{got}'")

    def model_file(self, default_filename: str) -> Path:
        """The model's file or directory: `default_model_filename` of the config, or `default_filename`.

        Raises NotFoundError with the place where it was looked for.
        """
        path = self.version_directory / (self.config.default_model_filename or default_filename)
        if not path.exists():
            raise NotFoundError(f"model '{self.model_name}' version {self.version}: no file {path}")
        return path


# What `BatchInstance.execute` returns.
Answers = Sequence[InferResponse | ServerError] | Sequence[InferResponse | ServerError | None] | None


class Instance:
    """One executable copy of a model on one placement."""

    def close(self) -> None:
        """Free what the instance holds. Called once, when no call is in progress."""

    def is_ready(self) -> bool:
        """Whether the instance can execute now; asked by the model-ready endpoints only."""
        return True

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        """The instance sees no more of a sequence of which it has seen a request: it may free what it kept of it.

        Only of models with `sequence_batching`; called between batches, by whoever calls `execute`. `reason` is
        "end" (its last request was executed), "idle" (no request came for `max_sequence_idle_microseconds`),
        "cancelled" (a client gave up one of its requests), "restarted" (a START came before an END) or "unloaded".
        """

    def measure(self) -> Sequence[Measurement]:
        """Numbers of its own for the metrics page. Asked at each scrape on the event loop thread: it must be quick."""
        return ()

    def can_execute(self) -> bool:
        """False while a call would have to wait, as for a process that is being restarted: others then go first.

        Asked before every batch, so it must not block.
        """
        return True


class BatchInstance(Instance, abc.ABC):
    """An instance that sees requests: full control over each request's inputs, outputs and errors."""

    # Whether `execute` may leave requests unanswered, to answer them later or many times. Read once, when the
    # instance stands. It is what a decoupled model needs, and costs every request a little.
    answers_later: bool = False

    @abc.abstractmethod
    def execute(self, requests: Sequence[InferRequest]) -> Answers:
        """One entry per request, in order; an error fails that request alone.

        An exception fails every request of the batch. Outputs that a request did not ask for may be
        present: the server drops them. RESCHEDULE is the entry of a request that is to be executed once more, of
        models with `iterative_sequence` only.

        Where `answers_later`, the entry None (or None for all of them) leaves the answer to `request.sender`, which
        has to be taken before `execute` returns; any other entry is the request's final response. An exception then
        fails those requests that have not ended.
        """

    # Whether reaching the instance costs enough that short batches had better travel there together.
    takes_several_batches: ClassVar[bool] = False

    def execute_batches(self, batches: Sequence[Sequence[InferRequest]]) -> Sequence[Answers | ServerError]:
        """For each batch what `execute` returns for it, or the error that failed it.

        Called only where `takes_several_batches`, with batches that are known to be short.
        """
        results: list[Answers | ServerError] = []
        for requests in batches:
            try:
                results.append(self.execute(requests))
            except ServerError as error:
                results.append(error)
        return results


class TensorInstance(Instance, abc.ABC):
    """An instance that sees whole batches: the server concatenates inputs and splits outputs by rows."""

    # Whether `interrupt` does anything. Read once, when the instance stands.
    can_be_interrupted: bool = False

    def interrupt(self, is_wanted: bool) -> None:
        """Let the run in progress, or the next one, end at once and raise CancelledError; with False, let runs be.

        Nobody waits for its outputs any more. Called from any thread, and not for long: the server says False
        before it lets the instance run for anybody else.
        """

    @abc.abstractmethod
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute the outputs for one batch, as arrays keyed by the config's output names.

        Arrays may be read-only views. With `max_batch_size` > 0 the first dimension of every array is
        the batch. An exception fails every request of the batch.
        """


class StepInstance(Instance, abc.ABC):
    """An instance that works on all its requests at once, step by step, and takes more on between steps.

    For continuous batching, as of language models. A worker thread of the server calls `add` for each request as it
    comes, `abort` for those whose clients have left, and `step` for as long as `has_work`; without work it sleeps.
    Answers go by `request.sender`, which `add` has to take. The sender must never be waited for within a step, so
    send with `wait=False`; where `has_room` of the sender is false, its client reads more slowly than the model writes.
    """

    @abc.abstractmethod
    def add(self, request: InferRequest) -> None:
        """Take a request on. An exception refuses it alone: a ServerError is its answer."""

    @abc.abstractmethod
    def abort(self, request: InferRequest) -> None:
        """Forget a request, and free what is kept for it: its client has left, or was told of an error.

        Called at most once for a request that was taken on, before the next step, also when it has just been
        finished: then there is nothing to do. The server answers it.
        """

    @abc.abstractmethod
    def step(self) -> None:
        """Go one step further with the requests at hand, and send what it gave.

        An exception fails all of them: each is aborted, and the instance goes on with those that come. If it still
        has work then, or `abort` fails too, it is not called again: it is not ready, and requests are refused.
        """

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether there is anything to do in a step."""

    @property
    def has_room(self) -> bool:
        """Whether the instance would take another request on now; if not, those that come wait in the model's queue.

        Asked before every step. There they can time out, and others can be refused because of `max_queue_size`.
        """
        return True


# What a backend may make.
AnyInstance = BatchInstance | TensorInstance | StepInstance


class Backend(abc.ABC):
    """One loaded version of a model: shared weights live here, instances are made from it."""

    # Instances answer in microseconds and never block: the server calls them on its event loop, unless the model's
    # config says `inline_execution: never`. Read after `load`, so that an object may decide by its config.
    runs_inline: bool = False
    # Instances may be called on the event loop if the model's config wants that: they live in this process and have
    # no thread of their own. Those that run inline can. Read after `load`.
    can_run_inline: bool = False
    # Instances made when instance_group gives no count, by device kind.
    default_cpu_instances: ClassVar[int] = 1
    supports_gpu: ClassVar[bool] = False
    # Its instances live in processes of their own making: the config's `instance_in_process` has nothing to add.
    has_processes: ClassVar[bool] = False
    # Fields of the model's config that this backend carries out; for any other backend they only cause a warning.
    # One of optimization.{graph, execution_accelerators, cuda, ...}, instance_group.{profile, secondary_devices}.
    acts_on: ClassVar[frozenset[str]] = frozenset()
    # Keys of `--backend-config` that this backend reads; a warning says so of any other. None: it does not tell.
    # default-max-batch-size and allow-pickle are everybody's.
    option_names: ClassVar[frozenset[str] | None] = None
    # `complete_config` reads small files only: it may be asked what a model would be that nobody has loaded yet.
    completes_quickly: ClassVar[bool] = False
    # The file in a version directory by which a model without `backend:` is recognised.
    model_filenames: ClassVar[tuple[str, ...]] = ()
    # Top-level modules that the backend needs beyond the server's own, and the extra that brings them.
    extra: ClassVar[str | None] = None

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        """The config of `context` with what the model's files say filled in (inputs, outputs, batching).

        Called off the event loop, before validation, unless auto-completion is switched off. Raises
        ConfigError when the config contradicts the files. The default completes nothing.
        """
        return context.config

    @classmethod
    def needs_process(cls, context: BackendContext) -> bool:  # noqa: ARG003  # others look at the files
        """Whether this model's instances had better live each in a process of its own, unless its config says no.

        For what holds the interpreter's lock while it executes, or may crash. Asked before `load`; must be quick.
        """
        return False

    @classmethod
    def diagnose(cls) -> Sequence[Finding]:
        """What `modelserver doctor` says of this machine as far as the backend is concerned: quick, never raises."""
        return ()

    def load(self) -> None:
        """Read weights and whatever instances share. Called once, off the event loop; may take long."""

    @abc.abstractmethod
    def create_instance(self, placement: Placement) -> AnyInstance:
        """An instance on `placement`. Called off the event loop, possibly for several placements at once."""

    def unload(self) -> None:
        """Free what `load` took. Called once, after every instance was closed."""

"""The contract between the server and a backend: all that a backend author imports.

A backend executes models of one framework. Its package (`backends/<name>/`, a directory under
`--backend-directory`, or an entry point in the group `modelserver.backends`) holds a module-level name
`BACKEND`: a subclass of `Backend`. The server makes one `Backend` per loaded model version and one
instance per placement; it owns every thread and queue, checks requests before they arrive, and calls
an instance from one thread at a time. `docs/backends.md` builds one step by step.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from modelserver.backend.context import (
    BackendContext,
    DeviceKind,
    ModelMetrics,
    Placement,
    ServerCalls,
    always,
    missing_package,
)
from modelserver.backend.instances import (
    Answers,
    AnyInstance,
    Array,
    BatchInstance,
    Instance,
    StepInstance,
    TensorInstance,
)
from modelserver.config.completion import FileSignature, FileTensor
from modelserver.config.hidden_tensors import model_inputs, model_outputs
from modelserver.config.modelfile import Modelfile, is_modelfile, read_modelfile
from modelserver.config.ollama_options import sampling_of
from modelserver.config.schema import (
    InstanceGroupKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelTransactionPolicy,
)
from modelserver.core.accelerator import load_extension
from modelserver.core.datatype import Datatype
from modelserver.core.documents import parse_json, shortened
from modelserver.core.interpreter import give_back
from modelserver.core.json_pieces import parse_pieces as parse_long_json
from modelserver.core.numerals import parse_float
from modelserver.core.request import InferRequest, LoadedAdapter
from modelserver.core.response import RESCHEDULE, InferResponse, ResponseStream, RowResponse
from modelserver.core.sender import ResponseSender
from modelserver.core.tensor import Tensor
from modelserver.errors import (
    CancelledError,
    ConfigError,
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.platform.captures import capture_turn
from modelserver.platform.cuda import DeviceArray
from modelserver.platform.device_loss import device_loss, note_device_error
from modelserver.platform.device_memory import DeviceMemory, Reservation, device_memory
from modelserver.platform.diagnosis import Finding, FindingLevel
from modelserver.platform.huge_pages import use_huge_pages
from modelserver.telemetry.gpu import free_gpu_bytes, visible_gpus
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
    "DeviceArray",
    "DeviceKind",
    "DeviceMemory",
    "ErrorCode",
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
    "LoadedAdapter",
    "Measurement",
    "ModelConfig",
    "ModelDynamicBatching",
    "ModelInput",
    "ModelInstanceGroup",
    "ModelMetrics",
    "ModelOutput",
    "ModelTransactionPolicy",
    "Modelfile",
    "NotFoundError",
    "Placement",
    "Reservation",
    "ResponseSender",
    "ResponseStream",
    "RowResponse",
    "ServerCalls",
    "ServerError",
    "StepInstance",
    "Tensor",
    "TensorInstance",
    "UnavailableError",
    "UnsupportedError",
    "always",
    "capture_turn",
    "device_loss",
    "device_memory",
    "free_gpu_bytes",
    "give_back",
    "is_modelfile",
    "load_extension",
    "missing_package",
    "model_inputs",
    "model_outputs",
    "note_device_error",
    "parse_float",
    "parse_json",
    "parse_long_json",
    "read_modelfile",
    "sampling_of",
    "shortened",
    "use_huge_pages",
    "visible_gpus",
]


class Backend(abc.ABC):
    """One loaded version of a model: shared weights live here, instances are made from it."""

    # Instances answer in microseconds and never block: the server calls them on its event loop, unless the model's
    # config says `inline_execution: never`. Read after `load`, so that an object may decide by its config.
    runs_inline: bool = False
    # Instances may be called on the event loop if the model's config wants that: they live in this process and have
    # no thread of their own. Those that run inline can. Read after `load`.
    can_run_inline: bool = False
    # Inputs that requests begin with. An instance that goes in steps may keep what it has computed of a beginning, and
    # then had better get the requests that share it: of the first of these inputs that a request has.
    prefix_inputs: Sequence[str] = ()
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
    # `complete_config` reads small files only: it may be called for models that are not loaded yet.
    completes_quickly: ClassVar[bool] = False
    # The file in a version directory by which a model without `backend:` is recognised.
    model_filenames: ClassVar[tuple[str, ...]] = ()
    # Top-level modules that the backend needs beyond the server's own, and the extra that brings them.
    extra: ClassVar[str | None] = None

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @classmethod
    def check_written(cls, context: BackendContext) -> None:
        """Raise ServerError for a config that asks for what this machine has not got, by what its author left out.

        Called first of all, off the event loop, also where auto-completion is switched off: later, defaults stand
        where nothing was written. The default finds nothing.
        """

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
    def runs_code_of(cls, context: BackendContext) -> bool:  # noqa: ARG003  # others look at the files
        """Whether the files of this version are code that the operator trusts: then a requirements.txt among them is
        installed. That in the model's directory, beside config.pbtxt, always is. Must be quick, and never raise.
        """
        return False

    @classmethod
    def diagnose(cls) -> Sequence[Finding]:
        """What `modelserver doctor` says of this machine as far as the backend is concerned: quick, never raises."""
        return ()

    @classmethod
    def quantize_version(
        cls, _source: Path, _target: Path, _method: str, _calibration: str | None, /
    ) -> tuple[Mapping[str, float], list[str]]:
        """Write the model of a version directory in fewer bits into another, empty one: figures by name, and notes.

        `_calibration` is a text that shows which inputs count. Called by `modelserver quantize`. The default raises
        UnsupportedError.
        """
        raise UnsupportedError(f"the models of {cls.__name__} are not quantized by their backend")

    @classmethod
    def convert_version(cls, _source: Path, _target: Path, _form: str, /) -> tuple[Mapping[str, float], list[str]]:
        """Write the model of a version directory in another form into an empty one: figures by name, and notes.

        Called by `modelserver convert` for forms of language models. The default raises UnsupportedError.
        """
        raise UnsupportedError(f"the models of {cls.__name__} are not converted by their backend")

    @classmethod
    def compare_versions(cls, _source: Path, _target: Path, _text: str, /) -> Mapping[str, float]:
        """How much a quantized model still says on a text what its source says: figures by name."""
        raise UnsupportedError(f"the models of {cls.__name__} are not compared on texts")

    def load(self) -> None:
        """Read weights and whatever instances share. Called once, off the event loop; may take long."""

    @abc.abstractmethod
    def create_instance(self, placement: Placement) -> AnyInstance:
        """An instance on `placement`. Called off the event loop, possibly for several placements at once."""

    def unload(self) -> None:
        """Free what `load` took. Called once, after every instance was closed."""

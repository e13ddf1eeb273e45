"""PyTorch models: weights are loaded once per device and shared by the instances on it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from modelserver.backend import (
    Backend,
    BackendContext,
    ConfigError,
    Datatype,
    DeviceKind,
    FileSignature,
    FileTensor,
    Finding,
    FindingLevel,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    Reservation,
    ServerError,
    UnavailableError,
    UnsupportedError,
    device_memory,
    model_inputs,
    model_outputs,
    visible_gpus,
)

from .aoti import load_package
from .archive import DAMAGE, FileKind, file_kind, first_lines, names_tensorrt
from .binding import bind_inputs, check_texts, output_positions, positions
from .instance import TorchInstance, set_interop_threads
from .options import ALLOW_NATIVE, TorchOptions, torch_options
from .program import Program, load_checkpoint, load_exported, load_torchscript, prepared
from .trust import NATIVE_PLATFORM, check_trust

_FILENAMES = ("model.pt", "model.pt2")
_MEMORY_BYTES = "memory_bytes"
_TORCH_TENSORRT = "torch_tensorrt"


class TorchBackend(Backend):
    """One version of a PyTorch model."""

    model_filenames = _FILENAMES
    extra = "pytorch"
    option_names = frozenset({ALLOW_NATIVE})
    acts_on = frozenset({"optimization.cuda", "optimization.input_pinned_memory", "optimization.output_pinned_memory"})
    can_run_inline = True
    supports_gpu = torch.cuda.is_available()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._lock = threading.Lock()  # guards what follows: instances may be created at once
        # Those that instances share, by device; None is where the file says.
        self._programs: dict[str | None, Program] = {}
        self._reservations: list[Reservation] = []
        self._options = TorchOptions()

    @classmethod
    def needs_process(cls, context: BackendContext) -> bool:
        """A package's library holds the interpreter's lock while it computes, and its code cannot be checked."""
        return _kind_of(context, _model_path(context)) is FileKind.PACKAGE

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        config = context.config
        path = _model_path(context)
        kind = _kind_of(context, path)
        _check_strings(context, kind)
        if kind is not FileKind.EXPORTED:
            check_trust(context, kind, path)
            if config.input and config.output:
                return config
            raise ConfigError(
                f"{_unlisted(context, kind, path)}: {path} tells neither datatypes nor shapes; list every input and "
                f"output in config.pbtxt ({_arguments_in_words(context, kind, path)}), or have that written: "
                f"'modelserver create NAME --from {path.name} --model-repository DIRECTORY --input NAME:DATATYPE:DIMS'"
            )
        program = _load(context, path, "cpu")
        assert program.signature is not None, "an exported program has a signature"
        return context.complete_config(_renamed(program.signature, config))

    @classmethod
    def diagnose(cls) -> Sequence[Finding]:
        built = torch.version.cuda or torch.version.hip
        found = f"PyTorch {torch.__version__}, {f'built for CUDA {built}' if built else 'built for CPUs'}"
        if built and not torch.cuda.is_available():
            return (Finding(FindingLevel.OK, "torch", f"{found}, and there is no device that it can use"),)
        if not built and visible_gpus():
            advice = "install a build of torch for the GPU's driver (pytorch.org, 'Start locally')"
            return (Finding(FindingLevel.WARNING, "torch", f"{found}: the GPUs of this machine are not used", advice),)
        return (Finding(FindingLevel.OK, "torch", found),)

    def load(self) -> None:
        self._options = torch_options(self.context)
        set_interop_threads(self.context.model_name, self._options.num_interop_threads)
        if not self._options.has_cudnn:
            torch.backends.cudnn.enabled = False  # the process's: so it is in Triton

    def create_instance(self, placement: Placement) -> TorchInstance:
        device = _device_of(placement)
        with self._lock:
            program = self._programs.get(device) if self._options.shares_weights else None
            if program is None:
                program = self._programs[device] = self._new_program(device)
        specs = model_inputs(self.context.config)
        names = [spec.name for spec in specs]
        try:
            binding = bind_inputs(names, program.arguments)
            if not binding.as_dict:
                texts = [spec.name for spec in specs if spec.data_type is Datatype.BYTES]
                check_texts(names, texts, program.arguments)
        except ConfigError as error:
            raise ConfigError(f"model '{self.context.model_name}': {error}") from error
        signature = None if program.signature is None else _renamed(program.signature, self.context.config)
        return TorchInstance(program, binding, self.context, self._options, device=device or "cpu", signature=signature)

    def unload(self) -> None:
        self._programs.clear()
        for reservation in self._reservations:
            reservation.release()
        self._reservations.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # gives freed memory back to the device

    def _new_program(self, device: str | None) -> Program:
        path = _model_path(self.context)
        _check_strings(self.context, _kind_of(self.context, path))
        reservation = self._reserve(path, device) if device is not None and device != "cpu" else None
        try:
            program = _load(self.context, path, device)
            if program.signature is not None:
                self.context.check_config(_renamed(program.signature, self.context.config))
            try:
                program = prepared(program, self._options)
            except UnsupportedError as error:
                raise UnsupportedError(f"model '{self.context.model_name}': {error}") from error
        except BaseException:
            if reservation is not None:
                reservation.release()
            raise
        if reservation is not None:
            reservation.settle()
            self._reservations.append(reservation)
        return program

    def _reserve(self, path: Path, device: str) -> Reservation:
        """The GPU memory of the weights: from the config, or their size on disk."""
        num_bytes = self.context.int_parameter(_MEMORY_BYTES) or path.stat().st_size
        free, _ = torch.cuda.mem_get_info(device)
        return device_memory(device).reserve(
            num_bytes,
            available=free,
            least=num_bytes,
            what=f"model '{self.context.model_name}'",
            purpose=f" on {device}",
        )


def _device_of(placement: Placement) -> str | None:
    """PyTorch's name of a placement's device; None for KIND_MODEL: the file says."""
    match placement.kind:
        case DeviceKind.GPU:
            return f"cuda:{placement.device_id}"
        case DeviceKind.MODEL:
            return None
        case _:
            return "cpu"


def _kind_of(context: BackendContext, path: Path) -> FileKind:
    """The kind of the file, by its content and by the config."""
    try:
        kind = file_kind(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"model '{context.model_name}' version {context.version}: {path} cannot be read: {error.strerror or error}"
        ) from error
    if context.config.platform == NATIVE_PLATFORM and kind is not FileKind.PACKAGE:
        raise InvalidArgumentError(
            f"model '{context.model_name}': platform {NATIVE_PLATFORM} expects an AOTInductor package, and {path} is "
            f'a {kind.value}; remove the platform and write backend: "pytorch"'
        )
    return kind


def _unlisted(context: BackendContext, kind: FileKind, path: Path) -> str:
    """Triton's sentence about a config that leaves out what the file does not say."""
    if context.config.input or kind is FileKind.PACKAGE:
        return (
            f"model '{context.model_name}': model configuration must contain at least one output, none were specified"
        )
    counts = f"configuration expects 0 inputs, model provides {len(_load(context, path, 'cpu').arguments.names)}"
    return f"unable to load model '{context.model_name}', {counts}"


def _arguments_in_words(context: BackendContext, kind: FileKind, path: Path) -> str:
    if kind is FileKind.PACKAGE:
        return "its inputs are called INPUT__0, …, or ARGS[0], …; its outputs OUTPUT__0, …, or RESULT[0], …"
    return f"forward takes: {', '.join(_load(context, path, 'cpu').arguments.names)}"


def _model_path(context: BackendContext) -> Path:
    if context.config.default_model_filename:
        return context.model_file("")
    found = [context.version_directory / name for name in _FILENAMES if (context.version_directory / name).is_file()]
    if len(found) == 1:
        return found[0]
    where = f"model '{context.model_name}' version {context.version}: {context.version_directory}"
    if found:
        raise InvalidArgumentError(
            f"{where} holds {' and '.join(_FILENAMES)}; choose one with default_model_filename in config.pbtxt"
        )
    raise NotFoundError(f"{where} holds neither {' nor '.join(_FILENAMES)}")


def _load(context: BackendContext, path: Path, device: str | None) -> Program:
    """The program in `path`. Raises InvalidArgumentError for a damaged file, UnsupportedError for untrusted code."""
    kind = _kind_of(context, path)
    try:
        if kind in (FileKind.TORCHSCRIPT, FileKind.EXPORTED) and names_tensorrt(path):
            _import_torch_tensorrt(context, path)
        check_trust(context, kind, path)
        match kind:
            case FileKind.TORCHSCRIPT:
                return load_torchscript(path, device)
            case FileKind.EXPORTED:
                return load_exported(path, device)
            case FileKind.PACKAGE:
                return load_package(path, device or "cpu")
            case FileKind.PICKLE:
                return load_checkpoint(path, device)
    except ServerError:
        raise
    except DAMAGE as error:
        raise InvalidArgumentError(
            f"model '{context.model_name}' version {context.version}: PyTorch cannot load the {kind.value} {path} "
            f"({path.stat().st_size} bytes): {first_lines(error)}"
        ) from error


def _import_torch_tensorrt(context: BackendContext, path: Path) -> None:
    """The library that knows the operators of such a module has to be there before it is loaded."""
    try:
        importlib.import_module(_TORCH_TENSORRT)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(
            f"model '{context.model_name}': {path} was compiled by Torch-TensorRT, and the package torch-tensorrt "
            f"cannot be imported ({error}): pip install torch-tensorrt, in the version that compiled it"
        ) from error


def _check_strings(context: BackendContext, kind: FileKind) -> None:
    """Text goes to and from TorchScript, as a list of strings, and to no other kind. Raises ConfigError."""
    config = context.config
    for role, specs in (("input", model_inputs(config)), ("output", model_outputs(config))):
        for spec in specs:
            if spec.data_type is not Datatype.BYTES:
                continue
            if kind is not FileKind.TORCHSCRIPT:
                raise ConfigError(
                    f"model '{context.model_name}': {spec.name}: PyTorch has no tensors of TYPE_STRING; turn text into "
                    "numbers in a Python model in front, or script the model: TorchScript takes List[str]"
                )
            shape = spec.dims if spec.reshape is None else spec.reshape.shape
            if len(shape) + (config.max_batch_size > 0) > 1:
                raise ConfigError(
                    f"Triton only supports 1 dimensional List of String as {role} for '{spec.name}' for model "
                    f"'{context.model_name}': write dims: [ -1 ] and max_batch_size: 0, or, for one text of each row, "
                    "dims: [ 1 ] reshape { shape: [ ] }"
                )


def _renamed(signature: FileSignature, config: ModelConfig) -> FileSignature:
    """The signature with the config's own names where those are `<name>__<position>`."""
    names = [spec.name for spec in model_inputs(config)]
    inputs = signature.inputs
    if len(names) == len(inputs) and not {tensor.name for tensor in inputs} & set(names) and _are_numbered(names):
        inputs = _with_names(inputs, dict(zip(positions(names), names, strict=True)))
    names = [spec.name for spec in model_outputs(config)] if config.output else []
    outputs = signature.outputs
    if (
        names
        and not {tensor.name for tensor in outputs} & set(names)
        and (_are_numbered(names) or _are_numbered([tensor.name for tensor in outputs]))
    ):
        outputs = _with_names(outputs, dict(zip(output_positions(names), names, strict=True)))
    return replace(signature, inputs=inputs, outputs=outputs)


def _are_numbered(names: list[str]) -> bool:
    return all(name.rpartition("__")[2].isdecimal() and "__" in name for name in names)


def _with_names(tensors: tuple[FileTensor, ...], names: dict[int, str]) -> tuple[FileTensor, ...]:
    return tuple(replace(tensor, name=names.get(place, tensor.name)) for place, tensor in enumerate(tensors))

"""PyTorch models: weights are loaded once per device and shared by the instances on it.

Thread counts are the process's: PyTorch has one intra-op pool, so the last model that sets it wins.
"""

from __future__ import annotations

import logging
import pickle
import threading
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
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    UnsupportedError,
    model_inputs,
    model_outputs,
)

from .archive import FileKind, file_kind, refuse_pickles
from .binding import bind_inputs, output_positions, positions
from .instance import TorchInstance
from .program import Program, load_checkpoint, load_exported, load_torchscript

log = logging.getLogger(__name__)

_FILENAMES = ("model.pt", "model.pt2")
_ALLOW_PICKLE = "allow-pickle"


class TorchBackend(Backend):
    """One version of a PyTorch model."""

    model_filenames = _FILENAMES
    extra = "pytorch"
    option_names = frozenset[str]()
    can_run_inline = True
    supports_gpu = torch.cuda.is_available()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._lock = threading.Lock()  # guards _programs: instances may be created at once
        self._programs: dict[str, Program] = {}

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        config = context.config
        _refuse_strings(context)
        path = _model_path(context)
        kind = file_kind(path)
        if kind is not FileKind.EXPORTED:
            if kind is FileKind.PICKLE:
                _check_pickles(context, kind, path)
            if config.input and config.output:
                return config
            taken = ", ".join(_load(context, path, "cpu").arguments.names)
            raise ConfigError(
                f"model '{context.model_name}': {path} tells neither datatypes nor shapes; list every input and output "
                f"in config.pbtxt (forward takes: {taken})"
            )
        program = _load(context, path, "cpu")
        assert program.signature is not None, "an exported program has a signature"
        return context.complete_config(_renamed(program.signature, config))

    def load(self) -> None:
        _refuse_strings(self.context)
        _set_threads(self.context)

    def create_instance(self, placement: Placement) -> TorchInstance:
        device = f"cuda:{placement.device_id}" if placement.kind is DeviceKind.GPU else "cpu"
        with self._lock:
            if device not in self._programs:
                self._programs[device] = self._new_program(device)
            program = self._programs[device]
        names = [spec.name for spec in model_inputs(self.context.config)]
        try:
            binding = bind_inputs(names, program.arguments)
        except ConfigError as error:
            raise ConfigError(f"model '{self.context.model_name}': {error}") from error
        signature = None if program.signature is None else _renamed(program.signature, self.context.config)
        return TorchInstance(program, binding, self.context, device=device, signature=signature)

    def unload(self) -> None:
        self._programs.clear()

    def _new_program(self, device: str) -> Program:
        program = _load(self.context, _model_path(self.context), device)
        if program.signature is not None:
            self.context.check_config(_renamed(program.signature, self.context.config))
        return program


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


def _load(context: BackendContext, path: Path, device: str) -> Program:
    """The program in `path`. Raises InvalidArgumentError for a damaged file, UnsupportedError for a pickle."""
    kind = file_kind(path)
    try:
        if kind is FileKind.TORCHSCRIPT:
            return load_torchscript(path, device)
        _check_pickles(context, kind, path)
        return load_exported(path, device) if kind is FileKind.EXPORTED else load_checkpoint(path, device)
    except (RuntimeError, ValueError, KeyError, AssertionError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidArgumentError(
            f"model '{context.model_name}' version {context.version}: PyTorch cannot load the {kind.value} {path} "
            f"({path.stat().st_size} bytes): {error}"
        ) from error


def _check_pickles(context: BackendContext, kind: FileKind, path: Path) -> None:
    """Raise UnsupportedError if loading the file would run a pickle that nobody has vouched for."""
    if context.options.get(_ALLOW_PICKLE, "false").lower() in ("true", "1"):
        return
    model = f"model '{context.model_name}' version {context.version}"
    advice = (
        "save the model with torch.export.save, or vouch for all models of this server with "
        f"--backend-config=pytorch,{_ALLOW_PICKLE}=true"
    )
    if kind is FileKind.PICKLE:
        danger = f"{path} is a {kind.value} (torch.save), which can run any code when loaded"
        raise UnsupportedError(f"{model}: {danger}; {advice}")
    try:
        refuse_pickles(path)
    except UnsupportedError as error:
        raise UnsupportedError(f"{model}: {error}; {advice}") from error


def _refuse_strings(context: BackendContext) -> None:
    config = context.config
    names = [spec.name for spec in model_inputs(config) if spec.data_type is Datatype.BYTES]
    names += [spec.name for spec in model_outputs(config) if spec.data_type is Datatype.BYTES]
    if names:
        raise ConfigError(
            f"model '{context.model_name}': {', '.join(names)}: PyTorch has no tensors of TYPE_STRING; turn text into "
            "numbers in a Python model in front"
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


def _set_threads(context: BackendContext) -> None:
    intra, inter = (context.int_parameter(f"{kind}_OP_THREAD_COUNT") for kind in ("INTRA", "INTER"))
    if intra > 0:
        torch.set_num_threads(intra)
    if inter > 0 and inter != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(inter)
        except RuntimeError:
            log.warning(
                "model '%s': INTER_OP_THREAD_COUNT %d comes too late: PyTorch sets it once per process, to %d",
                context.model_name,
                inter,
                torch.get_num_interop_threads(),
            )

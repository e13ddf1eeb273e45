"""Completes a model config from a model's file, and reports contradictions between the two.

A file's shapes are complete: with `max_batch_size` > 0 their first dimension is the batch, and the config's
`dims` are the other dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from modelserver.config.hidden_tensors import hidden_inputs, hidden_outputs, model_inputs
from modelserver.config.lenient_inputs import with_lenient_inputs
from modelserver.config.problem import Problem, error_of
from modelserver.config.schema import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput, ModelTensorReshape
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import did_you_mean, suggest

ConfigTensor = TypeVar("ConfigTensor", ModelInput, ModelOutput)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """An input or output of the file; -1 in `shape` is any size, None an unknown number of dimensions."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...] | None

    @property
    def can_batch(self) -> bool:
        """Whether the first dimension may be any size."""
        return self.shape is None or (len(self.shape) > 0 and self.shape[0] == -1)


@dataclass(frozen=True, slots=True)
class FileSignature:
    """The inputs and outputs of a model's file; `largest_batch` is the most rows it takes (None: no bound).

    `is_lenient`: clients may give its only input any name, and any input of numbers any numeric type. `columns` are
    the names of the columns of the only input, by which clients may send it in parts.
    """

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]
    largest_batch: int | None = None
    is_lenient: bool = False
    columns: tuple[str, ...] = ()

    @property
    def can_batch(self) -> bool:
        return all(tensor.can_batch for tensor in (*self.inputs, *self.outputs))

    @property
    def scalars(self) -> frozenset[str]:
        """Tensors of the file without any dimension; requests and responses carry one element."""
        return frozenset(tensor.name for tensor in (*self.inputs, *self.outputs) if tensor.shape == ())


def complete(config: ModelConfig, signature: FileSignature, *, default_max_batch_size: int, source: str) -> ModelConfig:
    """`config`, with missing batching, inputs and outputs filled in from the file.

    A model whose every tensor has a free first dimension gets `max_batch_size` and dynamic batching, unless
    the config lists that dimension in `dims`. Outputs are filled in only if the config lists none: a config may
    offer fewer. Raises ConfigError with every contradiction; `source` names the config in its lines.
    """
    completed = _complete_batching(config, signature, default_max_batch_size)
    batches = completed.max_batch_size > 0
    inputs = tuple(_fill(spec, _named(spec.name, signature.inputs), batches) for spec in config.input)
    outputs = tuple(_fill(spec, _named(spec.name, signature.outputs), batches) for spec in config.output)
    # Tensors that the server makes itself are listed elsewhere in the config.
    listed = {spec.name for spec in (*inputs, *hidden_inputs(config))}
    kept = {spec.name for spec in hidden_outputs(config)}
    inputs += tuple(
        _fill(ModelInput(name=tensor.name), tensor, batches)
        for tensor in signature.inputs
        if tensor.name not in listed and not _has_unknown(config, signature)
    )
    outputs = outputs or tuple(
        _fill(ModelOutput(name=tensor.name), tensor, batches) for tensor in signature.outputs if tensor.name not in kept
    )
    completed = replace(completed, input=inputs, output=outputs)
    if signature.is_lenient:
        completed = with_lenient_inputs(completed, signature.columns)
    check(completed, signature, source=source)
    return completed


def check(config: ModelConfig, signature: FileSignature, *, source: str) -> None:
    """Raise ConfigError with every line of `config` that the file contradicts."""
    problems = [
        *_batching_problems(config, signature),
        *_tensor_problems(config, "input", config.input, signature.inputs),
        *_tensor_problems(config, "output", config.output, signature.outputs),
        *_hidden_problems(config, "input", hidden_inputs(config), signature.inputs),
        *_hidden_problems(config, "output", hidden_outputs(config), signature.outputs),
    ]
    missing = {tensor.name for tensor in signature.inputs} - {spec.name for spec in model_inputs(config)}
    if missing and not _has_unknown(config, signature):
        names = ", ".join(sorted(missing))
        counts = f"configuration expects {len(config.input)} inputs, model provides {len(signature.inputs)}"
        summary = f"unable to load model '{config.name}', {counts}"
        problems.append(("input", f"expected every input of the model's file, {names} missing", None, summary))
    if problems:
        raise error_of((Problem(source, None, None, *problem) for problem in problems), source)


_Found = tuple[str, str, str | None, str]  # field, message, hint, summary


def _complete_batching(config: ModelConfig, signature: FileSignature, default_max_batch_size: int) -> ModelConfig:
    if config.max_batch_size or not signature.can_batch or _lists_batch_dimension(config, signature):
        return config
    max_batch_size = signature.largest_batch or default_max_batch_size
    if max_batch_size < 1:
        return config
    completed = replace(config, max_batch_size=max_batch_size)
    has_scheduler = config.dynamic_batching or config.sequence_batching or config.ensemble_scheduling
    if max_batch_size > 1 and not has_scheduler:
        completed = replace(completed, dynamic_batching=ModelDynamicBatching())
    return completed


def _lists_batch_dimension(config: ModelConfig, signature: FileSignature) -> bool:
    """Whether the config's dims name the file's first dimension too: it then wants no batching."""
    files = {tensor.name: tensor.shape for tensor in (*signature.inputs, *signature.outputs)}
    specs: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    return any(spec.dims and len(_model_dims(spec)) == len(files.get(spec.name) or ()) for spec in specs)


def _model_dims(spec: ModelInput | ModelOutput) -> tuple[int, ...]:
    """The dims that the model sees."""
    return spec.dims if spec.reshape is None else spec.reshape.shape


def _fill(spec: ConfigTensor, tensor: FileTensor | None, batches: bool) -> ConfigTensor:
    if tensor is None:
        return spec
    if spec.data_type is None:
        spec = replace(spec, data_type=tensor.datatype)
    if not spec.dims and tensor.shape is not None:
        dims = tensor.shape[1:] if batches else tensor.shape
        # A config has no scalars. With batching, one element per row is reshaped away in front of the model;
        # without it an empty reshape is not allowed, and the backend drops the dimension (`scalars`).
        reshape = ModelTensorReshape() if batches and not dims else spec.reshape
        spec = replace(spec, dims=dims or (1,), reshape=reshape)
    return spec


def _named(name: str, tensors: Sequence[FileTensor]) -> FileTensor | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)


def _has_unknown(config: ModelConfig, signature: FileSignature) -> bool:
    """Whether an input's name is not in the file: it is then a misspelt missing input."""
    return any(_named(spec.name, signature.inputs) is None for spec in model_inputs(config))


def _batching_problems(config: ModelConfig, signature: FileSignature) -> list[_Found]:
    size = config.max_batch_size
    if size == 0:
        return []
    if signature.largest_batch is not None and size > signature.largest_batch:
        message = f"expected at most {signature.largest_batch}, as the file allows, got {size}"
        return [("max_batch_size", message, None, "")]
    fixed = [
        f"'{tensor.name}' has shape {_shown(tensor.shape)}"
        for tensor in (*signature.inputs, *signature.outputs)
        if not tensor.can_batch and not (size == 1 and tensor.shape and tensor.shape[0] == 1)
    ]
    if not fixed:
        return []
    return [
        (
            "max_batch_size",
            f"expected 0, because the model's file does not batch: {', '.join(fixed)}; got {size}",
            "export the model with a free first dimension",
            f"autofill failed for model '{config.name}': model does not support batching while non-zero "
            "max_batch_size is specified",
        )
    ]


def _tensor_problems(
    config: ModelConfig, kind: str, specs: Sequence[ModelInput | ModelOutput], tensors: Sequence[FileTensor]
) -> list[_Found]:
    problems: list[_Found] = []
    names = [tensor.name for tensor in tensors]
    counts = f"configuration expects {len(specs)} {kind}s, model provides {len(tensors)}"
    # Outputs that are split by the shapes of an input are flat.
    scattered = {name for batch_output in config.batch_output for name in batch_output.target_name}
    for index, spec in enumerate(specs):
        path = f"{kind}[{index}]"
        tensor = _named(spec.name, tensors)
        if tensor is None:
            message = f"expected one of the file's {kind}s {', '.join(names)}, got '{spec.name}'"
            summary = f"unexpected inference {kind} '{spec.name}', allowed {kind}s are: {', '.join(sorted(names))}"
            if kind == "input" and len(specs) > len(tensors):
                summary = f"unable to load model '{config.name}', {counts}"
            problems.append((f"{path}.name", message, did_you_mean(suggest(spec.name, names)), summary))
            continue
        if spec.data_type is not None and spec.data_type is not tensor.datatype:
            expected, got = tensor.datatype.config_name, spec.data_type.config_name
            disagrees = f"configuration expects datatype {got} for {kind} '{spec.name}', model provides {expected}"
            summary = f"unable to load model '{config.name}', {disagrees}"
            problems.append((f"{path}.data_type", f"expected {expected} for '{spec.name}', got {got}", None, summary))
        if spec.name not in scattered:
            problems.extend(_shape_problems(path, spec, tensor, config))
    return problems


def _hidden_problems(
    config: ModelConfig, kind: str, specs: Sequence[ModelInput | ModelOutput], tensors: Sequence[FileTensor]
) -> list[_Found]:
    """Problems of tensors that the server makes or keeps: sequence controls and states, batch inputs."""
    problems: list[_Found] = []
    names = [tensor.name for tensor in tensors]
    batch_inputs = {name for batch_input in config.batch_input for name in batch_input.target_name}
    for spec in specs:
        field = "batch_input" if spec.name in batch_inputs else "sequence_batching"
        tensor = _named(spec.name, tensors)
        if tensor is None:
            message = f"expected '{spec.name}' to be one of the file's {kind}s {', '.join(names)}"
            provides = f"configuration specified sequence control '{spec.name}', but model does not provide that {kind}"
            summary = provides if field == "sequence_batching" else ""
            problems.append((field, message, did_you_mean(suggest(spec.name, names)), summary))
        elif spec.data_type is not None and spec.data_type is not tensor.datatype:
            expected, got = tensor.datatype.config_name, spec.data_type.config_name
            problems.append((field, f"expected {expected} for '{spec.name}', got {got}", None, ""))
    return problems


def _shape_problems(path: str, spec: ModelInput | ModelOutput, tensor: FileTensor, config: ModelConfig) -> list[_Found]:
    batches = config.max_batch_size > 0
    if tensor.shape is None or not spec.dims:
        return []
    dims = _model_dims(spec)
    if isinstance(spec, ModelInput) and spec.allow_ragged_batch:
        if len(tensor.shape) == 1 and tensor.shape[0] == -1:
            return []
        message = (
            f"expected [-1] as the file's shape of '{spec.name}', because it is ragged, got {_shown(tensor.shape)}"
        )
        expects = f"configuration expects model provides input with shape [-1] for ragged input '{spec.name}'"
        summary = f"unable to load model '{config.name}', {expects}, model provides {_compact(tensor.shape)}"
        return [(f"{path}.allow_ragged_batch", message, "a ragged batch is one flat tensor", summary)]
    expected = tensor.shape[1:] if batches else tensor.shape
    if not batches and not expected and set(dims) == {1}:
        return []
    # A variable dimension of the file accepts any size in the config, but not the other way round.
    if len(dims) == len(expected) and all(file in (-1, ours) for file, ours in zip(expected, dims, strict=True)):
        return []
    without = " without its batch dimension" if batches else ""
    field = f"{path}.dims" if spec.reshape is None else f"{path}.reshape"
    message = f"expected {_shown(expected)} for '{spec.name}' (the file's shape{without}), got {_shown(dims)}"
    hint = None
    if batches and tuple(dims) == tensor.shape:
        hint = "dims leave the batch dimension out when max_batch_size > 0"
    return [(field, message, hint, _disagreement(spec, tensor.shape, dims, config))]


def _disagreement(
    spec: ModelInput | ModelOutput, shape: Sequence[int], dims: Sequence[int], config: ModelConfig
) -> str:
    """Triton's sentence about dims that are not those of the file."""
    full, how = tuple(dims), f"{len(dims)} dimensions (shape {_compact(dims)})"
    if config.max_batch_size > 0:
        full = (-1, *dims)
        how = (
            f"{len(full)} dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            f"tensor shape, making complete shape {_compact(full)})"
        )
    expects = f"the model expects {len(shape)} dimensions (shape {_compact(shape)})"
    return f"model '{config.name}', tensor '{spec.name}': {expects} but the model configuration specifies {how}"


def _compact(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _shown(shape: Sequence[int] | None) -> str:
    return "of unknown rank" if shape is None else str(list(shape))

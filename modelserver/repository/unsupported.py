"""Config fields, and settings of --backend-config, that have no effect.

A field that changes a model's answers stops the load; a field that only tunes its speed, or a setting that the backend
does not know, gives a warning. None is ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from modelserver.backend import Backend
from modelserver.backend.discovery import list_backends
from modelserver.config.problem import Problem
from modelserver.config.schema import (
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    OptimizationPriority,
)
from modelserver.core.spelling import did_you_mean, suggest
from modelserver.repository.options import DefinitionOptions
from modelserver.telemetry.histogram import FIRST_RESPONSE_MS

# (field path, why it matters)
Finding = tuple[str, str]


def unsupported_problems(config: ModelConfig, source: str, acts_on: Collection[str] = ()) -> tuple[Problem, ...]:
    """One problem per field that asks for something this version does not execute, except for `acts_on`."""
    return tuple(
        _problem(source, field, f"this version does not execute {what}")
        for field, what in _refused(config)
        if _without_index(field) not in acts_on
    )


def ignored_warnings(config: ModelConfig, source: str, acts_on: Collection[str] = ()) -> tuple[Problem, ...]:
    """One warning per field that has no effect in this version and changes no answer.

    `config` is as written: values that `normalise` fills in are not the user's wish. `acts_on` are the fields that
    the model's backend carries out itself, as in `Backend.acts_on`.
    """
    ignored = [
        _problem(source, field, f"has no effect in this version: {what}")
        for field, what in _ignored(config)
        if _without_index(field) not in acts_on
    ]
    if config.dynamic_batching is not None and not config.max_batch_size:
        what = "max_batch_size is 0, so each request is executed alone; of dynamic batching only its queues are there"
        ignored.append(_problem(source, "dynamic_batching", what))
    return tuple(ignored)


def _without_index(field: str) -> str:
    """The field as `Backend.acts_on` names it."""
    return re.sub(r"\[\d+\]", "", field)


def _problem(source: str, field: str, message: str) -> Problem:
    return Problem(source=source, line=None, column=None, field=field, message=message)


def _refused(config: ModelConfig) -> Iterator[Finding]:
    if config.runtime and not config.runtime.endswith(".py"):  # Triton's way to say "Python-based"
        yield "runtime", "a choice of backend runtimes"
    yield from _refused_tensors(config)


def _refused_tensors(config: ModelConfig) -> Iterator[Finding]:
    tensors: list[tuple[str, ModelInput | ModelOutput]] = [
        *((f"input[{index}]", spec) for index, spec in enumerate(config.input)),
        *((f"output[{index}]", output) for index, output in enumerate(config.output)),
    ]
    for path, tensor in tensors:
        if tensor.is_shape_tensor:
            yield f"{path}.is_shape_tensor", "shape tensors"
        if tensor.is_non_linear_format_io:
            yield f"{path}.is_non_linear_format_io", "tensors in a non-linear format"


def _ignored(config: ModelConfig) -> Iterator[Finding]:
    if config.model_operations is not None and config.model_operations.op_library_filename:
        yield "model_operations.op_library_filename", "no backend loads libraries of operations"
    if config.cc_model_filenames:
        yield "cc_model_filenames", "every device gets the same model file; choose it by default_model_filename"
    needs_inputs = not config.input or not all(tensor.optional for tensor in config.input)
    for index, warmup in enumerate(config.model_warmup):
        if needs_inputs and not warmup.inputs:
            yield f"model_warmup[{index}]", "it has no inputs, so it is skipped"
    if not config.max_batch_size:
        for index, tensor in enumerate(config.input):
            if tensor.allow_ragged_batch:
                yield f"input[{index}].allow_ragged_batch", "max_batch_size is 0, so there are no batches"
    yield from _ignored_in_scheduling(config)
    for index, group in enumerate(config.instance_group):
        yield from _ignored_in_group(f"instance_group[{index}]", group)
    controls = config.model_metrics.metric_control if config.model_metrics is not None else ()
    families = {control.metric_identifier.family if control.metric_identifier else "" for control in controls}
    if families - {FIRST_RESPONSE_MS}:
        yield "model_metrics", f"all metrics but {FIRST_RESPONSE_MS} have fixed buckets"
    if config.optimization is not None:
        yield from _ignored_in_optimization(config.optimization)


def _ignored_in_scheduling(config: ModelConfig) -> Iterator[Finding]:
    batching = config.dynamic_batching
    if batching is not None and not batching.priority_levels:
        what = "there are no priority_levels"
        if batching.default_priority_level:
            yield "dynamic_batching.default_priority_level", what
        for level in batching.priority_queue_policy:
            yield f"dynamic_batching.priority_queue_policy[{level}]", what
    sequences = config.sequence_batching
    for index, tensor in enumerate(sequences.control_input if sequences is not None else ()):
        path = f"sequence_batching.control_input[{index}]"
        if not tensor.control:
            yield path, "it has no control, so the model gets no such input"
        for position in range(len(tensor.control) - 1):
            yield f"{path}.control[{position}]", f"input '{tensor.name}' carries the last of its controls only"


def _ignored_in_optimization(optimization: ModelOptimizationPolicy) -> Iterator[Finding]:
    if optimization.graph is not None:
        yield "optimization.graph", "the model's backend has no levels of optimization"
    if optimization.execution_accelerators is not None:
        yield "optimization.execution_accelerators", "the model's backend has no accelerators"
    if optimization.priority is not OptimizationPriority.PRIORITY_DEFAULT:
        yield "optimization.priority", "no backend gives its device work a priority"
    if optimization.cuda is not None:
        yield "optimization.cuda", "the model's backend captures no CUDA graphs"
    if optimization.input_pinned_memory is not None:
        yield "optimization.input_pinned_memory", "the model's backend copies through no pinned memory"
    if optimization.output_pinned_memory is not None:
        yield "optimization.output_pinned_memory", "the model's backend copies through no pinned memory"
    if optimization.gather_kernel_buffer_threshold:
        yield "optimization.gather_kernel_buffer_threshold", "inputs are gathered on the CPU"
    if optimization.eager_batching:
        yield "optimization.eager_batching", "batches are gathered when an instance is free"


def _ignored_in_group(path: str, group: ModelInstanceGroup) -> Iterator[Finding]:
    if group.secondary_devices:
        yield f"{path}.secondary_devices", "no backend uses secondary devices"
    if group.profile:
        yield f"{path}.profile", "optimization profiles belong to TensorRT"


# Settings that any backend accepts: ours, and the settings that Triton's server passes to all of its backends.
FOR_ALL = frozenset(
    {
        "allow-pickle",
        "auto-complete-config",
        "backend-directory",
        "default-max-batch-size",
        "environment-directory",
        "execute-timeout-seconds",
        "min-compute-capability",
        "output-lines-per-second",
        "pip-arguments",
    }
)


def setting_warnings(options: DefinitionOptions, name: str, backend_class: type[Backend]) -> tuple[Problem, ...]:
    """One warning for each setting that is passed to backend `name` and that the backend does not know.

    Backends that do not declare their settings are not checked.
    """
    if backend_class.option_names is None:
        return ()
    known = backend_class.option_names | FOR_ALL
    given = [(f"{name},{key}", key) for key in options.backend_config.get(name, {})]
    given += [(key, key) for key in options.backend_config.get("", {})]
    return tuple(
        Problem(
            source=f"--backend-config={written}",
            line=None,
            column=None,
            field="",
            message=f"has no effect: backend '{name}' knows no setting '{key}'",
            hint=did_you_mean(suggest(key, known)),
        )
        for written, key in given
        if key not in known
    )


def unknown_backends(options: DefinitionOptions) -> tuple[str, ...]:
    """A sentence for each backend that `--backend-config` names but that is not installed.

    Empty if models may bring their own backends.
    """
    named = [name for name in options.backend_config if name]
    if options.allow_model_backends or not named:
        return ()
    known = [listing.name for listing in list_backends(options.backend_directories)]
    return tuple(
        f"--backend-config={name},...: there is no backend '{name}'" + _hint(suggest(name, known))
        for name in named
        if name not in known
    )


def _hint(nearest: str | None) -> str:
    return f"; {did_you_mean(nearest)}" if nearest else ""

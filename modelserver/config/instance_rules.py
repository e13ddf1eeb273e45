"""Rules for instance groups, rate limiters and warmup requests."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from modelserver.config.hidden_tensors import model_inputs
from modelserver.config.problem import Report, key_path
from modelserver.config.schema import InstanceGroupKind, ModelConfig, ModelInstanceGroup, ModelWarmup, WarmupInput
from modelserver.config.tensor_rules import check_dims
from modelserver.core.spelling import did_you_mean, suggest

# The parameter `instance_in_process`: whether each instance runs in its own process.
INSTANCE_IN_PROCESS = "instance_in_process"
_WORDS = {"true": True, "false": False}


def instance_in_process(config: ModelConfig) -> bool | None:
    """The value in a valid config; None if it is not set."""
    return _WORDS.get(config.parameters.get(INSTANCE_IN_PROCESS, ""))


def check_instance_process(config: ModelConfig, report: Report) -> None:
    """Report an unknown value of the parameter."""
    word = config.parameters.get(INSTANCE_IN_PROCESS)
    if word is not None and word not in _WORDS:
        hint = did_you_mean(suggest(word, _WORDS))
        report.add(key_path("parameters", INSTANCE_IN_PROCESS), f"expected true or false, got '{word:.40}'", hint)


def check_instances(config: ModelConfig, gpu_ids: Sequence[int] | None, report: Report) -> None:
    """Report wrong instance groups; `gpu_ids` are the devices that may be used, None if not known."""
    check_instance_process(config, report)
    resources: dict[str, tuple[bool, str]] = {}
    for index, group in enumerate(config.instance_group):
        path = f"instance_group[{index}]"
        if group.count < 0:
            report.add(f"{path}.count", f"expected a count >= 0 (0 is the default), got {group.count}")
        _check_gpus(group, index, gpu_ids, report)
        for position, resource in enumerate(group.rate_limiter.resources if group.rate_limiter else ()):
            where = f"{path}.rate_limiter.resources[{position}]"
            report.check_name(f"{where}.name", resource.name, "the name of a resource")
            is_global, first = resources.setdefault(resource.name, (resource.global_, where))
            if is_global != resource.global_:
                present = f'Resource "{resource.name}" is present as both global and device-specific resource'
                message = f"resource '{resource.name}' is {_scope(is_global)} in {first}"
                report.add(f"{where}.global", message, summary=f"{present} in the model configuration.")


def _scope(is_global: bool) -> str:
    return "global" if is_global else "per device"


def _check_gpus(group: ModelInstanceGroup, index: int, gpu_ids: Sequence[int] | None, report: Report) -> None:
    path = f"instance_group[{index}]"
    named = f"instance group {group.name or f'{report.model_name}_{index}'} of model {report.model_name}"
    if group.kind is InstanceGroupKind.KIND_CPU:
        if group.gpus:
            listed = ", ".join(str(gpu) for gpu in group.gpus)
            message = f"instances of KIND_CPU have no GPUs, got {listed}"
            summary = f"{named} has kind KIND_CPU but specifies one or more GPUs"
            report.add(f"{path}.gpus", message, "use kind: KIND_GPU", summary=summary)
        return
    usable = ", ".join(str(gpu) for gpu in gpu_ids) if gpu_ids else "none"
    for position, gpu in enumerate(group.gpus):
        least = "GPUs with at least the minimum required CUDA compute compatibility"
        summary = f"{named} specifies invalid or unsupported gpu id {gpu}. {least} are: {usable}"
        if gpu < 0:
            report.add(f"{path}.gpus[{position}]", f"expected a GPU id >= 0, got {gpu}", summary=summary)
        elif gpu_ids is not None and gpu not in gpu_ids:
            message = f"expected a usable GPU id ({usable}), got {gpu}"
            report.add(f"{path}.gpus[{position}]", message, summary=summary)
    if group.kind is InstanceGroupKind.KIND_GPU and not group.gpus and gpu_ids is not None and not gpu_ids:
        summary = f"{named} has kind KIND_GPU but no GPUs are available"
        hint = "use kind: KIND_AUTO or KIND_CPU"
        report.add(f"{path}.kind", "KIND_GPU needs a usable GPU, none is available", hint, summary=summary)


def check_warmup(config: ModelConfig, report: Report) -> None:
    """Report warmup requests that the model could not execute."""
    for index, warmup in enumerate(config.model_warmup):
        path = f"model_warmup[{index}]"
        largest = max(1, config.max_batch_size)
        if warmup.batch_size > largest:
            what = "max_batch_size" if config.max_batch_size else "the model has no batch dimension"
            report.add(f"{path}.batch_size", f"expected at most {largest} ({what}), got {warmup.batch_size}")
        _check_warmup_inputs(config, warmup, path, report)


def _check_warmup_inputs(config: ModelConfig, warmup: ModelWarmup, path: str, report: Report) -> None:
    if not warmup.inputs:  # it is skipped
        return
    declared = {tensor.name: tensor for tensor in model_inputs(config)}
    missing = [tensor.name for tensor in config.input if not tensor.optional and tensor.name not in warmup.inputs]
    if missing:
        report.add(f"{path}.inputs", f"expected every input that is not optional, missing {', '.join(missing)}")
    for name, tensor in warmup.inputs.items():
        where = key_path(f"{path}.inputs", name)
        is_fixed = check_dims(tensor.dims, f"{where}.dims", report, allow_variable=False)
        _check_data(tensor, where, report)
        model_input = declared.get(name)
        if model_input is None:
            if config.input:  # without inputs the backend may still complete the config
                hint = did_you_mean(suggest(name, declared))
                report.add(where, f"expected an input of the model, got '{name}'", hint)
            continue
        if tensor.data_type is not model_input.data_type and model_input.data_type is not None:
            got = "none" if tensor.data_type is None else tensor.data_type.config_name
            report.add(f"{where}.data_type", f"expected {model_input.data_type.config_name}, the input's, got {got}")
        if is_fixed and model_input.dims and not _fits(tensor.dims, model_input.dims):
            expected = f"a shape that fits dims {list(model_input.dims)}"
            report.add(f"{where}.dims", f"expected {expected} of the input, got {list(tensor.dims)}")


def _check_data(tensor: WarmupInput, path: str, report: Report) -> None:
    given = [name for name in ("zero_data", "random_data", "input_data_file") if getattr(tensor, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        report.add(path, f"expected exactly one of zero_data, random_data, input_data_file, got {got}")
    if tensor.input_data_file is not None:
        report.check_name(f"{path}.input_data_file", tensor.input_data_file, "a file under warmup/")
        report.check_file(f"{path}.input_data_file", tensor.input_data_file)


def _fits(dims: Sequence[int], pattern: Sequence[int]) -> bool:
    return len(dims) == len(pattern) and all(allowed in (-1, size) for size, allowed in zip(dims, pattern, strict=True))


# The parameter `inline_execution`: whether a model may be executed on the event loop itself.
INLINE_EXECUTION = "inline_execution"


class InlineExecution(enum.Enum):
    """The values of the parameter; a config without it leaves the choice to the backend."""

    NEVER = "never"  # in worker threads, regardless of the backend
    ALWAYS = "always"  # on the event loop, however long it takes
    AUTO = "auto"  # on the event loop if it is measured to be fast, and as long as it is


def inline_execution(config: ModelConfig) -> InlineExecution | None:
    """The value in a valid config; None if it is not set."""
    word = config.parameters.get(INLINE_EXECUTION)
    return None if word is None else InlineExecution(word)


def check_inline_execution(config: ModelConfig, report: Report) -> None:
    """Report an unknown value of the parameter."""
    word = config.parameters.get(INLINE_EXECUTION)
    words = [choice.value for choice in InlineExecution]
    if word is not None and word not in words:
        hint = did_you_mean(suggest(word, words))
        report.add(
            key_path("parameters", INLINE_EXECUTION), f"expected one of {', '.join(words)}, got '{word:.40}'", hint
        )

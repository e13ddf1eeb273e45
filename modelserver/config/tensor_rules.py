"""Rules for inputs, outputs, batch inputs and batch outputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from modelserver.config.problem import Report
from modelserver.config.schema import BatchInput, BatchOutput, InputFormat, ModelConfig, ModelInput, ModelOutput
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import did_you_mean, suggest

_TENSORRT = ("tensorrt", "tensorrt_plan", "tensorrt_rtx")
_TENSORRT_FLAGS = {
    "is_shape_tensor": "shape tensors are only supported for TensorRT platform",
    "is_non_linear_format_io": "Non-linear IO format is only supported for the TensorRT platform",
}
_SIZES = "must be integer >= 1, or -1 to indicate a variable-size dimension"
_SCALAR_HINT = "a scalar is dims: [ 1 ] with reshape { shape: [ ] }"
MAX_ELEMENTS = 2**63 - 1


def check_tensors(config: ModelConfig, report: Report) -> None:
    """Report the problems of every input and output."""
    for index, tensor in enumerate(config.input):
        _check_tensor(config, tensor, f"input[{index}]", report)
    for index, output in enumerate(config.output):
        _check_tensor(config, output, f"output[{index}]", report)
    _check_own_names("input", [tensor.name for tensor in config.input], report)
    _check_own_names("output", [tensor.name for tensor in config.output], report)
    inputs = frozenset(tensor.name for tensor in config.input)
    _check_batch_inputs(config, inputs, report)
    _check_batch_outputs(config, inputs, report)


def _check_own_names(kind: str, names: Sequence[str], report: Report) -> None:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        first = seen.setdefault(name, index)
        if name and first != index:
            report.add(f"{kind}[{index}].name", f"expected a name of its own, got '{name}' as in {kind}[{first}]")


def check_dims(
    dims: Sequence[int], path: str, report: Report, *, allow_variable: bool = True, summary: str = ""
) -> bool:
    """Report invalid sizes; returns whether all are valid."""
    expected = "expected a size >= 1, or -1 for any" if allow_variable else "expected a size >= 1"
    before = len(report.problems)
    for index, size in enumerate(dims):
        if size < 1 and not (allow_variable and size == -1):
            report.add(f"{path}[{index}]", f"{expected}, got {size}", summary=summary)
    if len(report.problems) > before:
        return False
    if math.prod(size for size in dims if size > 0) > MAX_ELEMENTS:
        report.add(path, f"expected at most {MAX_ELEMENTS} elements, got {_shown(dims)}")
        return False
    return True


def _check_tensor(config: ModelConfig, tensor: ModelInput | ModelOutput, path: str, report: Report) -> None:
    kind = "input" if isinstance(tensor, ModelInput) else "output"
    unnamed = f"model {kind} must specify 'name' for {report.model_name}"
    report.check_name(f"{path}.name", tensor.name, "a name", summary=unnamed)
    if tensor.data_type is None:
        hint, summary = "for example data_type: TYPE_FP32", _summary(tensor, "must specify 'data_type'", report)
        report.add(f"{path}.data_type", "expected a data type, got none", hint, summary=summary)
    sizes = _summary(tensor, f"dimension {_SIZES}", report)
    if not tensor.dims:
        summary = _summary(tensor, "must specify 'dims'", report)
        report.add(f"{path}.dims", "expected at least one dimension, got none", _SCALAR_HINT, summary=summary)
    elif check_dims(tensor.dims, f"{path}.dims", report, summary=sizes):
        _check_reshape(config, tensor, path, report)
    runs_on = config.backend or config.platform
    for flag, what in _TENSORRT_FLAGS.items():
        if getattr(tensor, flag) and runs_on and runs_on not in _TENSORRT:
            message = f"only the tensorrt backend has it, this model's is {runs_on}"
            report.add(f"{path}.{flag}", message, summary=f"{what} for {report.model_name}")
    if isinstance(tensor, ModelInput):
        _check_input(tensor, path, report)
    else:
        report.check_file(f"{path}.label_filename", tensor.label_filename)


def _check_input(tensor: ModelInput, path: str, report: Report) -> None:
    if tensor.format is not InputFormat.FORMAT_NONE and len(tensor.dims) != 3:
        summary = f"model input NHWC/NCHW require 3 dims for {report.model_name}"
        report.add(f"{path}.format", f"{tensor.format.name} needs 3 dims, got {_shown(tensor.dims)}", summary=summary)


def _check_reshape(config: ModelConfig, tensor: ModelInput | ModelOutput, path: str, report: Report) -> None:
    if tensor.reshape is None:
        return
    shape, where = tensor.reshape.shape, f"{path}.reshape.shape"
    if not check_dims(shape, where, report, summary=_summary(tensor, f"reshape dimensions {_SIZES}", report)):
        return
    if not shape and config.max_batch_size == 0:
        cannot = "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        summary = _summary(tensor, cannot, report)
        report.add(where, "an empty shape needs max_batch_size > 0, got 0", summary=summary)
    elif tensor.dims.count(-1) != shape.count(-1):
        message = f"expected as many -1 as in dims {_shown(tensor.dims)}, got {_shown(shape)}"
        # As in Triton, which counts elements first: a -1 on one side alone makes the sizes differ.
        what = "number of variable-size dimensions" if -1 in tensor.dims and -1 in shape else "size"
        report.add(where, message, summary=_summary(tensor, f"has different {what} for dims and reshape", report))
    elif _chunks(tensor.dims) != _chunks(shape):
        what = "as many elements as" if -1 not in shape else "as many elements between the -1s as in"
        summary = _summary(tensor, "has different size for dims and reshape", report)
        report.add(where, f"expected {what} dims {_shown(tensor.dims)}, got {_shown(shape)}", summary=summary)


def _summary(tensor: ModelInput | ModelOutput, what: str, report: Report) -> str:
    """Triton's sentence about a tensor."""
    kind = "input" if isinstance(tensor, ModelInput) else "output"
    return f"model {kind} '{tensor.name}' {what} for {report.model_name}"


def _chunks(dims: Sequence[int]) -> list[int]:
    """The number of elements before, between and after the variable dimensions."""
    products = [1]
    for size in dims:
        if size == -1:
            products.append(1)
        else:
            products[-1] *= size
    return products


def _check_batch_inputs(config: ModelConfig, inputs: Collection[str], report: Report) -> None:
    taken = {tensor.name: "an input of the model" for tensor in config.input}
    for index, batch_input in enumerate(config.batch_input):
        path = f"batch_input[{index}]"
        if batch_input.data_type not in (Datatype.INT32, Datatype.FP32):
            got = "none" if batch_input.data_type is None else batch_input.data_type.config_name
            summary = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {report.model_name}"
            report.add(f"{path}.data_type", f"expected TYPE_INT32 or TYPE_FP32, got {got}", summary=summary)
        _check_source(inputs, batch_input, path, report)
        for position, name in enumerate(batch_input.target_name):
            where = f"{path}.target_name[{position}]"
            report.check_name(where, name, "a name")
            if name in taken:
                report.add(where, f"'{name}' is already {taken[name]}")
            taken[name] = f"a target of {path}"


def _check_batch_outputs(config: ModelConfig, inputs: Collection[str], report: Report) -> None:
    outputs = frozenset(tensor.name for tensor in config.output)
    taken: dict[str, str] = {}
    for index, batch_output in enumerate(config.batch_output):
        path = f"batch_output[{index}]"
        _check_source(inputs, batch_output, path, report)
        for position, name in enumerate(batch_output.target_name):
            where = f"{path}.target_name[{position}]"
            if name not in outputs:
                hint = did_you_mean(suggest(name, outputs))
                summary = f"unknown target output name '{name}' for {report.model_name}"
                report.add(where, f"expected an output of the model, got '{name}'", hint, summary=summary)
            elif name in taken:
                summary = f"target output name '{name}' can only be specified once for {report.model_name}"
                report.add(where, f"'{name}' is already a target of {taken[name]}", summary=summary)
            taken[name] = path


def _check_source(inputs: Collection[str], batched: BatchInput | BatchOutput, path: str, report: Report) -> None:
    """Check for exactly one source, which is an input, and at least one target."""
    if not batched.target_name:
        report.add(f"{path}.target_name", "expected the name of a tensor, got none")
    if len(batched.source_input) != 1:
        count = len(batched.source_input)
        kind = f"batch {'input' if isinstance(batched, BatchInput) else 'output'} kind '{batched.kind.name}'"
        summary = f"{kind} expects 1 source input, got {count} for {report.model_name}"
        report.add(f"{path}.source_input", f"expected exactly one input, got {count}", summary=summary)
    for index, name in enumerate(batched.source_input):
        if name not in inputs:
            hint = did_you_mean(suggest(name, inputs))
            message = f"expected an input of the model, got '{name}'"
            summary = f"unknown source input name '{name}' for {report.model_name}"
            report.add(f"{path}.source_input[{index}]", message, hint, summary=summary)


def _shown(dims: Sequence[int]) -> str:
    return f"[{', '.join(str(size) for size in dims)}]"

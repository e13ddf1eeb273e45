"""PyTorch programs as ONNX models, by torch's own exporter. Needs torch, onnx and onnxscript."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelserver.config.schema import ModelConfig
from modelserver.config.signature import TensorSpec
from modelserver.errors import UnsupportedError
from modelserver.toolkit import require
from modelserver.toolkit.onnx_file import read_onnx, strip_origin, subgraphs
from modelserver.toolkit.torch_module import (
    example_tensor,
    first_line,
    load_program,
    load_torchscript,
    quiet_torch,
    torch_library,
)

DEFAULT_OPSET = 18
# torch's exporter translates to this opset at least; older ones are made from it by a converter that may not succeed.
_OPERATOR = re.compile(r"\b(aten|prims|torchvision|_caffe2|onnx|torchao)(?:::|\.)([A-Za-z_]\w*)")


def program_to_onnx(path: Path, config: ModelConfig, *, shown: str, opset: int | None = None) -> Any:
    """A torch.export program's file as an ONNX model with the names of `config`; errors call it `shown`.

    Raises UnsupportedError that names the operators that cannot be translated.
    """
    torch = torch_library()
    require("onnxscript", extra="convert", purpose="torch's ONNX exporter")
    program = load_program(path)
    inputs = [spec.name for spec in config.input]
    outputs = [spec.name for spec in config.output]
    try:
        with quiet_torch(), torch.no_grad():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
                opset_version=opset or DEFAULT_OPSET,
            )
            model = exported.model_proto
    except Exception as error:  # a family of private classes
        raise UnsupportedError(_refusal(shown, error)) from error
    return _finished(model, batch=bool(config.max_batch_size))


def torchscript_to_onnx(path: Path, config: ModelConfig, *, shown: str, opset: int | None = None) -> Any:
    """A TorchScript archive as an ONNX model; batch and dimensions of -1 are variable. Raises UnsupportedError."""
    torch = torch_library()
    module = load_torchscript(path)
    first = 1 if config.max_batch_size else 0
    specs = [TensorSpec(spec.name, spec.data_type, spec.dims) for spec in config.input if spec.data_type is not None]
    example = tuple(example_tensor(torch, spec, config.max_batch_size) for spec in specs)
    axes: dict[str, dict[int, str]] = {}
    tensors = [(spec.name, spec.dims) for spec in config.input] + [(spec.name, spec.dims) for spec in config.output]
    for name, dims in tensors:
        axes[name] = {place + first: f"{name}_{place}" for place, size in enumerate(dims) if size < 0}
        if first:
            axes[name][0] = "batch"
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "model.onnx"
        try:
            with quiet_torch(), torch.no_grad():
                torch.onnx.export(
                    module,
                    example,
                    str(made),
                    dynamo=False,
                    input_names=[spec.name for spec in config.input],
                    output_names=[spec.name for spec in config.output],
                    dynamic_axes=axes,
                    opset_version=min(opset or DEFAULT_OPSET, 20),
                )
        except Exception as error:  # the old exporter raises whatever it meets
            raise UnsupportedError(_refusal(shown, error)) from error
        return _finished(read_onnx(made), batch=bool(config.max_batch_size))


def _refusal(shown: str, error: Exception) -> str:
    """The error, and the operators that caused it, found in the chain of causes."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    about = [
        text for text in texts if "No ONNX function found" in text or "nsupported" in text or "not supported" in text
    ]
    names = sorted({f"{space}::{name}" for text in about[-1:] for space, name in _OPERATOR.findall(text)})
    if names:
        return (
            f"torch's ONNX exporter has no translation for {', '.join(names)} in '{shown}': replace them in the model, "
            "or serve it as it is (--to pt2, --to aoti)"
        )
    return f"torch's ONNX exporter cannot convert '{shown}': {first_line(Exception(texts[-1]))}"


def _finished(model: Any, *, batch: bool) -> Any:
    strip_origin(model)
    if batch:
        _name_batch(model)
    return model


def _name_batch(model: Any) -> None:
    """Call the symbol of the first dimension `batch`, wherever it stands: exporters call it s77."""
    symbols = {value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input if _has_dims(value)}
    if len(symbols) != 1 or "" in symbols:
        return
    (symbol,) = symbols
    graphs: list[Any] = [model.graph]
    while graphs:
        graph = graphs.pop()
        _rename(symbol, (*graph.input, *graph.output, *graph.value_info))
        graphs += subgraphs(graph)


def _has_dims(value: Any) -> bool:
    return bool(value.type.tensor_type.shape.dim)


def _rename(symbol: str, values: Sequence[Any]) -> None:
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_param = "batch"

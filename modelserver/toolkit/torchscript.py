"""TorchScript archives: their inputs and outputs, determined by calling them. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelserver.config.schema import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput
from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError
from modelserver.toolkit.tensor_spec import ModuleOptions
from modelserver.toolkit.torch_module import example_tensor, first_line, quiet_torch, torch_library


def load_torchscript(path: Path) -> Any:
    """The archive's module. Raises InvalidArgumentError for a damaged file."""
    torch = torch_library()
    try:
        with quiet_torch():
            return torch.jit.load(str(path), map_location="cpu").eval()
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"PyTorch cannot load the TorchScript archive '{path}': {first_line(error)}"
        ) from error


def describe_torchscript(path: Path, options: ModuleOptions) -> ModelConfig:
    """The config that such a file needs: inputs as they were said, outputs as a call gives them.

    Raises InvalidArgumentError when inputs were not said, or do not fit.
    """
    module = load_torchscript(path)
    taken = [argument.name for argument in module.forward.schema.arguments[1:]]
    if not options.inputs:
        raise InvalidArgumentError(
            f"'{path}' is TorchScript, which tells neither datatypes nor shapes: say them for each argument of "
            f"forward({', '.join(taken)}), such as --input {taken[0] if taken else 'x'}:FP32:3,224,224 (without the "
            "batch), or name a model directory with a config.pbtxt"
        )
    names = [spec.name for spec in options.inputs]
    if names != taken[: len(names)]:
        raise InvalidArgumentError(
            f"--input: expected the arguments of forward({', '.join(taken)}) in order, got {names}"
        )
    results = call_torchscript(module, options.inputs, options.max_batch_size)
    outputs = [
        ModelOutput(
            name=name, data_type=_datatype(tensor), dims=tuple(tensor.shape[1 if options.max_batch_size else 0 :])
        )
        for name, tensor in results.items()
    ]
    return ModelConfig(
        backend="pytorch",
        max_batch_size=options.max_batch_size,
        input=tuple(ModelInput(name=spec.name, data_type=spec.datatype, dims=spec.dims) for spec in options.inputs),
        output=tuple(outputs),
        dynamic_batching=ModelDynamicBatching() if options.max_batch_size > 1 else None,
    )


def call_torchscript(module: Any, inputs: tuple[TensorSpec, ...], max_batch_size: int) -> dict[str, Any]:
    """The outputs of a call with example inputs, by the names that the pytorch backend gives them."""
    torch = torch_library()
    example = [example_tensor(torch, spec, max_batch_size) for spec in inputs]
    try:
        with quiet_torch(), torch.inference_mode():
            result = module(*example)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InvalidArgumentError(f"--input: the model refuses such inputs: {lines[-1]}") from error
    if isinstance(result, torch.Tensor):
        result = (result,)
    if isinstance(result, dict):
        return {str(key): value for key, value in result.items()}
    return {f"OUTPUT__{place}": value for place, value in enumerate(result)}


def _datatype(tensor: Any) -> Datatype:
    word = str(tensor.dtype).removeprefix("torch.")
    if word == "bfloat16":
        return Datatype.BF16
    import numpy as np

    return Datatype.from_numpy(np.dtype(word))

"""One placement of a PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from modelserver.backend import (
    Array,
    BackendContext,
    Datatype,
    FileSignature,
    InternalError,
    InvalidArgumentError,
    TensorInstance,
    model_inputs,
    model_outputs,
)

from .binding import InputBinding, output_positions
from .program import Program
from .tensors import TORCH_DTYPES, to_numpy, to_torch


class TorchInstance(TensorInstance):
    """Calls the program that all instances on a device share; `signature` has the config's names, if it is known."""

    def __init__(
        self,
        program: Program,
        binding: InputBinding,
        context: BackendContext,
        *,
        device: str = "cpu",
        signature: FileSignature | None = None,
    ) -> None:
        config = context.config
        self._call = program.call
        self._binding = binding
        self._device = None if device == "cpu" else device
        self._bfloat16 = {spec.name for spec in model_inputs(config) if spec.data_type is Datatype.BF16}
        outputs = model_outputs(config)
        places = output_positions([spec.name for spec in outputs])
        self._outputs = [
            (spec.name, place, TORCH_DTYPES[spec.data_type])
            for spec, place in zip(outputs, places, strict=True)
            if spec.data_type is not None
        ]
        self._scalars = signature.scalars if signature is not None else frozenset()
        self._is_inference_mode = context.bool_parameter("INFERENCE_MODE", True)
        self._is_optimized = not context.bool_parameter("DISABLE_OPTIMIZED_EXECUTION")

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with self._modes():
            tensors = {name: self._tensor(name, array) for name, array in inputs.items()}
            try:
                result = self._execute(tensors)
            except AssertionError as error:
                # Exported programs assert the bounds of their dynamic dimensions.
                raise InvalidArgumentError(f"the exported program refuses the inputs: {error}") from error
            except RuntimeError as error:
                raise InternalError(f"PyTorch failed: {_reason(error)}") from error
            return self._arrays(result)

    def _modes(self) -> AbstractContextManager[object]:
        mode: AbstractContextManager[object] = torch.inference_mode() if self._is_inference_mode else torch.no_grad()
        if self._is_optimized:
            return mode
        stack = ExitStack()
        stack.enter_context(mode)
        stack.enter_context(torch.jit.optimized_execution(False))
        return stack

    def _tensor(self, name: str, array: Array) -> Any:
        if name in self._scalars:
            array = array.reshape(())
        tensor = to_torch(array, name in self._bfloat16)
        return tensor if self._device is None else tensor.to(self._device)

    def _execute(self, tensors: dict[str, Any]) -> Any:
        binding = self._binding
        if binding.as_dict:
            return self._call(tensors)
        # An optional input that the request left out is None.
        positional = [tensors.get(name) for name in binding.positional]
        return self._call(*positional, **{name: tensors[name] for name in binding.keywords if name in tensors})

    def _arrays(self, result: Any) -> dict[str, Array]:
        if isinstance(result, torch.Tensor):
            result = (result,)
        arrays = {}
        for name, place, dtype in self._outputs:
            tensor = _picked(result, name, place)
            if tensor.dtype is not dtype:
                raise InternalError(
                    f"output '{name}': the model gives {tensor.dtype}, the config says {dtype}; correct its data_type"
                )
            array = to_numpy(tensor)
            arrays[name] = array.reshape(1) if name in self._scalars else array
        return arrays


def _reason(error: RuntimeError) -> str:
    """One line of the error; TorchScript puts it behind pages of its own traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_torchscript = any(line.startswith("Traceback of TorchScript") for line in lines)
    return lines[-1].removeprefix("RuntimeError: ") if is_torchscript else lines[0]


def _picked(result: Any, name: str, place: int) -> Any:
    """The tensor of output `name`: by key from a dict, by position from a tuple or list."""
    if isinstance(result, dict):
        if name not in result:
            raise InternalError(f"output '{name}': the model gives a dict with the keys {', '.join(map(str, result))}")
        tensor = result[name]
    elif not isinstance(result, tuple | list):
        raise InternalError(f"output '{name}': the model gives a {type(result).__name__} instead of tensors")
    elif place >= len(result):
        raise InternalError(f"output '{name}': the model gives {len(result)} results, the config wants number {place}")
    else:
        tensor = result[place]
    if not isinstance(tensor, torch.Tensor):
        raise InternalError(f"output '{name}': the model gives a {type(tensor).__name__} instead of a tensor")
    return tensor

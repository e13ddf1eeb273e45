"""One placement of a PyTorch model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from modelserver.backend import (
    Array,
    BackendContext,
    Datatype,
    DeviceArray,
    FileSignature,
    InternalError,
    InvalidArgumentError,
    ServerError,
    TensorInstance,
    UnavailableError,
    device_loss,
    model_inputs,
    model_outputs,
    note_device_error,
)

from .binding import InputBinding, output_positions
from .cuda_lane import CudaLane
from .options import TorchOptions
from .program import Program
from .tensors import DATATYPES, TORCH_DTYPES, from_texts, to_numpy, to_texts, to_torch

# How many threads compute for an instance: PyTorch's number belongs to the thread that calls, and is kept there.
# `torch.set_num_threads` sets the calling thread's number, and that with which later threads begin (OpenMP's nthreads
# variable). Each instance is called by a thread of its own, so each can have its own number.


log = logging.getLogger(__name__)

# PyTorch's own settings at import, before any model changes them.
_DEFAULT = torch.get_num_threads()
_here = threading.local()


def use_threads(count: int) -> None:
    """Set the number of threads that this thread's operations use from here on; 0 restores PyTorch's own choice."""
    if getattr(_here, "count", -1) != count:
        torch.set_num_threads(count or _DEFAULT)
        _here.count = count


def set_interop_threads(model_name: str, count: int) -> None:
    """Set the process's threads between operators, which can be done once: a warning says that it was too late."""
    if count <= 0 or count == torch.get_num_interop_threads():
        return
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        log.warning(
            "model '%s': INTER_OP_THREAD_COUNT %d comes too late: PyTorch sets it once per process, to %d",
            model_name,
            count,
            torch.get_num_interop_threads(),
        )


# The memory format is one of images: [batch, channels, height, width].
_CHANNELS_LAST_RANK = 4


class TorchInstance(TensorInstance):
    """Calls the program that the instances on a device share; `signature` has the config's names, if it is known."""

    def __init__(
        self,
        program: Program,
        binding: InputBinding,
        context: BackendContext,
        options: TorchOptions,
        *,
        device: str = "cpu",
        signature: FileSignature | None = None,
    ) -> None:
        config = context.config
        self._call = program.call
        self._binding = binding
        self._options = options
        # On a GPU only.
        self._lane = CudaLane(device, is_pinned=options.is_pinned) if device.startswith("cuda") else None
        self.gpu = self._lane.gpu if self._lane is not None else None
        if self._lane is not None and options.has_cuda_graphs and not (binding.as_dict or binding.keywords):
            self._call = self._lane.graphed(program.call)
        self._input_types = {spec.name: spec.data_type for spec in model_inputs(config)}
        outputs = model_outputs(config)
        places = _places([spec.name for spec in outputs], program.result_names)
        self._outputs = [
            (spec.name, place, TORCH_DTYPES.get(spec.data_type))
            for spec, place in zip(outputs, places, strict=True)
            if spec.data_type is not None
        ]
        self._scalars = signature.scalars if signature is not None else frozenset()
        self._num_threads = options.num_threads

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        found: Mapping[str, Any] = self.run_on_device(inputs, {})
        return found

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        use_threads(self._num_threads)
        try:
            arrays = self._run(inputs, targets)
        except RuntimeError as error:
            # Without its frames, whose tensors keep memory that the next batch needs.
            raise _failure(error) from error.with_traceback(None)
        if self._options.cleans_cache and self._lane is not None:
            torch.cuda.empty_cache()
        return arrays

    def is_ready(self) -> bool:
        """Not on a GPU that this process has lost."""
        return self._lane is None or not device_loss()

    def _run(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        with self._modes():
            tensors = {name: self._tensor(name, array) for name, array in inputs.items()}
            try:
                result = self._execute(tensors)
            except AssertionError as error:
                # Exported programs assert the bounds of their dynamic dimensions.
                raise InvalidArgumentError(f"the exported program refuses the inputs: {error}") from error
            return self._arrays(result, targets)

    def _modes(self) -> AbstractContextManager[object]:
        options = self._options
        mode: AbstractContextManager[object] = torch.inference_mode() if options.is_inference_mode else torch.no_grad()
        if options.is_optimized and self._lane is None:
            return mode
        stack = ExitStack()
        stack.enter_context(mode)
        if not options.is_optimized:
            stack.enter_context(torch.jit.optimized_execution(False))
        if self._lane is not None:
            stack.enter_context(self._lane.open())
        return stack

    def _tensor(self, name: str, array: Array | DeviceArray) -> Any:
        datatype = self._input_types.get(name)
        if name in self._scalars and datatype is not Datatype.BYTES:
            array = array.reshape(())
        if isinstance(array, DeviceArray):
            assert self._lane is not None, "the server gives them only to an instance with a GPU"
            assert datatype is not None, "a checked input has a datatype"
            tensor = self._lane.borrow(array, TORCH_DTYPES[datatype])
        elif array.dtype == object:
            return to_texts(name, array)
        else:
            tensor = to_torch(array, datatype is Datatype.BF16)
        if self._options.is_channels_last and tensor.dim() == _CHANNELS_LAST_RANK:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        if self._lane is None or isinstance(array, DeviceArray):
            return tensor
        return self._lane.upload(tensor)

    def _placed(self, name: str, tensor: Any, target: DeviceArray) -> DeviceArray:
        """The output in the memory that its client has registered, once the lane is done."""
        assert self._lane is not None, "the caller has looked"
        array = target.beginning(DATATYPES[tensor.dtype].numpy, tuple(tensor.shape))
        self._lane.place(tensor.detach(), array)
        return array.reshape(1) if name in self._scalars else array

    def _execute(self, tensors: dict[str, Any]) -> Any:
        binding = self._binding
        if binding.as_dict:
            return self._call(tensors)
        # An optional input that the request left out is None.
        positional = [tensors.get(name) for name in binding.positional]
        return self._call(*positional, **{name: tensors[name] for name in binding.keywords if name in tensors})

    def _arrays(self, result: Any, targets: Mapping[str, DeviceArray]) -> dict[str, Array | DeviceArray]:
        if isinstance(result, torch.Tensor) or _is_texts(result):
            result = (result,)
        picked = {name: _picked(result, name, place, is_text=dtype is None) for name, place, dtype in self._outputs}
        arrays: dict[str, Array | DeviceArray] = {
            name: from_texts(picked.pop(name)) for name, _, dtype in self._outputs if dtype is None
        }
        if self._lane is not None:
            for name, dtype in [(name, dtype) for name, _, dtype in self._outputs if name in targets]:
                if picked[name].is_cuda and picked[name].dtype is dtype and picked[name].nbytes <= targets[name].nbytes:
                    arrays[name] = self._placed(name, picked.pop(name), targets[name])
            # Without tensors it waits too, for what was placed.
            picked = dict(zip(picked, self._lane.download(list(picked.values())), strict=True))
        for name, dtype in [(name, dtype) for name, _, dtype in self._outputs if name in picked]:
            tensor = picked[name]
            if tensor.dtype is not dtype:
                expected, found = DATATYPES[dtype].config_name, DATATYPES.get(tensor.dtype)
                raise InternalError(
                    f"configuration expects datatype {expected} for output '{name}', model provides "
                    f"{found.config_name if found is not None else tensor.dtype}; correct its data_type"
                )
            array = to_numpy(tensor)
            arrays[name] = array.reshape(1) if name in self._scalars else array
        return arrays


def _places(names: list[str], result_names: tuple[str, ...]) -> tuple[int, ...]:
    """Where each output stands in the results: where a package says, else by Triton's naming conventions."""
    if result_names and set(names) <= set(result_names):
        return tuple(result_names.index(name) for name in names)
    return output_positions(names)


def _failure(error: RuntimeError) -> ServerError:
    """The answer to a batch that PyTorch could not compute, at once or when its results were waited for."""
    reason = _reason(error)
    if isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in reason:
        return UnavailableError(
            "the GPU has too little free memory for this batch: send fewer rows at once, set a smaller max_batch_size, "
            f"or unload a model: {reason}"
        )
    note_device_error(error)
    return InternalError(f"PyTorch failed: {reason}")


def _reason(error: RuntimeError) -> str:
    """One line of the error; TorchScript puts it behind pages of its own traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_torchscript = any(line.startswith("Traceback of TorchScript") for line in lines)
    return lines[-1].removeprefix("RuntimeError: ") if is_torchscript else lines[0]


def _is_texts(result: Any) -> bool:
    """Whether it is one List[str], and not a list of outputs; TorchScript has no list of both."""
    return isinstance(result, list) and all(isinstance(text, str) for text in result)


def _picked(result: Any, name: str, place: int, *, is_text: bool) -> Any:
    """The tensor, or list of strings, of output `name`: by key from a dict, by position from a tuple or list."""
    if isinstance(result, dict):
        if name not in result:
            raise InternalError(f"output '{name}': the model gives a dict with the keys {', '.join(map(str, result))}")
        tensor = result[name]
    elif not isinstance(result, tuple | list):
        raise InternalError(f"output '{name}': the model gives a {type(result).__name__} instead of tensors")
    elif place >= len(result):
        raise InternalError(
            f"The output {name} in the model configuration refers to an output index which doesn't exist. This model "
            f"has {len(result)} outputs, and {name} would be number {place}, counted from 0"
        )
    else:
        tensor = result[place]
    if is_text != _is_texts(tensor) or not (is_text or isinstance(tensor, torch.Tensor)):
        wanted = "list of strings" if is_text else "tensor"
        raise InternalError(f"output '{name}': the model gives a {type(tensor).__name__} instead of a {wanted}")
    return tensor

"""A tensor of another library on a GPU: kept there as long as the model uses it, copied when the server needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from modelserver.backend import Datatype
from modelserver.backend import Tensor as CoreTensor

from .pb_error import TritonModelException

# DLPack's kDLCUDA, kDLROCM and kDLCUDAManaged.
_HAVE_STREAMS = (2, 10, 13)
# By the name that PyTorch gives its types.
_DATATYPES = {
    "bool": Datatype.BOOL,
    "uint8": Datatype.UINT8,
    "int8": Datatype.INT8,
    "int16": Datatype.INT16,
    "int32": Datatype.INT32,
    "int64": Datatype.INT64,
    "float16": Datatype.FP16,
    "bfloat16": Datatype.BF16,
    "float32": Datatype.FP32,
    "float64": Datatype.FP64,
}


class DeviceTensor:
    """Reads the tensor through PyTorch, which shares its memory. `source` is what the model gave, or PyTorch's view."""

    __slots__ = ("_stream", "_view", "datatype", "device", "shape", "source")

    def __init__(self, name: str, source: Any, device: tuple[int, int]) -> None:
        """`source` is an array of a library that speaks DLPack, or a bare capsule; `device` is DLPack's type and id.

        Raises TritonModelException without PyTorch or its CUDA, and for a type that no datatype carries.
        """
        try:
            import torch

            self.device = device
            # Who asks for the elements later does so from another thread perhaps, or behind another stream.
            self._stream = torch.cuda.current_stream(device[1]) if device[0] in _HAVE_STREAMS else None
            with self.current():
                view = source.detach() if isinstance(source, torch.Tensor) else torch.from_dlpack(source)
        except ImportError as error:
            raise TritonModelException(
                f"Tensor '{name}' is on a device (DLPack type {device[0]}): reading it takes PyTorch, which is not "
                "installed where the model runs; install it, or move the tensor to the CPU first"
            ) from error
        except (RuntimeError, BufferError, TypeError, AssertionError) as error:
            raise TritonModelException(
                f"Tensor '{name}' is on a device (DLPack type {device[0]}) that PyTorch cannot read: {error}; "
                "move the tensor to the CPU first"
            ) from error
        type_name = str(view.dtype).removeprefix("torch.")
        if type_name not in _DATATYPES:
            raise TritonModelException(f"Tensor '{name}': no Triton datatype carries {view.dtype}")
        # A capsule can be used once, and that was it.
        self.source = source if hasattr(source, "__dlpack__") else view
        self.datatype = _DATATYPES[type_name]
        self.shape: tuple[int, ...] = tuple(view.shape)
        self._view = view

    def on_host(self, name: str) -> CoreTensor:
        """A copy in the host's memory; waits for what the device still computes."""
        view = self._view.detach()
        with self.current():
            if self.datatype is Datatype.BF16:
                import torch

                # NumPy has no BF16: the same 16 bits.
                return CoreTensor(name, self.datatype, view.view(torch.int16).cpu().numpy().view("uint16"))
            return CoreTensor(name, self.datatype, view.cpu().numpy())

    def dlpack(self, **options: Any) -> Any:
        """A capsule for a consumer, whose `stream` among the options waits for what the model has queued. `options`
        are DLPack's; a producer of an older version takes only the stream."""
        given = {name: value for name, value in options.items() if value is not None or name == "stream"}
        with self.current():
            return self.source.__dlpack__(**given)

    def current(self) -> AbstractContextManager[object]:
        """The stream that was current when the model made this tensor, and its device: PyTorch hands out tensors of
        the current device only, and waits for the current stream."""
        if self._stream is None:
            return nullcontext()
        import torch

        found: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return found

"""A tensor of another library on a GPU: kept there as long as the model uses it, copied when the server needs it."""

from __future__ import annotations

from typing import Any

from modelserver.backend import Datatype
from modelserver.backend import Tensor as CoreTensor

from .pb_error import TritonModelException

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

    __slots__ = ("_view", "datatype", "device", "shape", "source")

    def __init__(self, name: str, source: Any, device: tuple[int, int]) -> None:
        """`source` is an array of a library that speaks DLPack, or a bare capsule; `device` is DLPack's type and id.

        Raises TritonModelException without PyTorch or its CUDA, and for a type that no datatype carries.
        """
        try:
            import torch

            view = torch.from_dlpack(source)
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
        self.device = device
        self.datatype = _DATATYPES[type_name]
        self.shape: tuple[int, ...] = tuple(view.shape)
        self._view = view

    def on_host(self, name: str) -> CoreTensor:
        """A copy in the host's memory; waits for what the device still computes."""
        view = self._view.detach()
        if self.datatype is Datatype.BF16:
            import torch

            # NumPy has no BF16: the same 16 bits.
            return CoreTensor(name, self.datatype, view.view(torch.int16).cpu().numpy().view("uint16"))
        return CoreTensor(name, self.datatype, view.cpu().numpy())

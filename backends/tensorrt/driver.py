"""Whether there is a GPU that works, asked of the driver itself: before any TensorRT object is made.

Without a driver some of TensorRT's objects are null pointers within, and using one ends the process.
"""

from __future__ import annotations

import ctypes

from modelserver.backend import UnavailableError

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def find_problem() -> str:
    """Why no GPU can be used, in words; empty if one can."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return f"no NVIDIA driver is installed ({_LIBRARY}: {_short(error)})"
    try:
        status = int(cuda.cuInit(0))
        if status == _NO_DEVICE:
            return "an NVIDIA driver is installed, and it sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        if status:
            return f"the NVIDIA driver does not start (cuInit: {_name(cuda, status)}); see what nvidia-smi says"
        count = ctypes.c_int()
        status = int(cuda.cuDeviceGetCount(ctypes.byref(count)))
    except AttributeError as error:
        return f"{_LIBRARY} is not a usable CUDA driver: {error}"
    if status:
        return f"the NVIDIA driver cannot count its GPUs (cuDeviceGetCount: {_name(cuda, status)})"
    return "" if count.value else "the NVIDIA driver sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"


def driver_version() -> int:
    """The newest CUDA that the driver knows, as 13000 for 13.0; 0 if there is none."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
        version = ctypes.c_int()
        return version.value if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
    except (OSError, AttributeError):
        return 0


def require_gpu(model_name: str) -> None:
    """Raise UnavailableError, in Triton's words and with what was found, unless a GPU can be used."""
    problem = find_problem()
    if problem:
        raise UnavailableError(
            f"unable to load model '{model_name}', TensorRT backend supports only GPU device: {problem}. Serve it on a "
            'machine with an NVIDIA GPU; a CPU serves ONNX files, with backend: "onnxruntime", and no engines'
        )


def _name(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    return f"{(text.value or b'unknown').decode(errors='replace')}, {status}"


def _short(error: OSError) -> str:
    return str(error).removeprefix(f"{_LIBRARY}: ")

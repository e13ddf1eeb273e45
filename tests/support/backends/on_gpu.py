"""What the backend directory has for `backend: "on_gpu"`."""

from support import gpu_model

BACKEND = gpu_model.GpuBackend

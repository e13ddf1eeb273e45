"""The optional part in C (`_kernels.c`): what an engine on a CPU does in every step, and torch in many operations.

It is there when a compiler was at the installation. Without it, or with MODELSERVER_PURE_PYTHON=1 in the environment,
torch does the same in more and slower steps. Whoever asks decides when a network is built, so that no step asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

import torch

from modelserver.backend import load_extension

_DTYPES = (torch.float32, torch.bfloat16)


def load(environment: Mapping[str, str]) -> ModuleType | None:
    """The module in C; None where torch does its work."""
    return load_extension(f"{__package__}._kernels", environment)


KERNELS = load(os.environ)


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module, if it computes on tensors like these."""
    return KERNELS if device.type == "cpu" and dtype in _DTYPES else None

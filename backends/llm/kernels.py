"""The optional parts in C: what an engine on a CPU does in every step, and torch in many operations (`_kernels.c`), and
products with weights in few bits (`_packed_linear.c`).
`has_triton` says whether this machine can run kernels in Triton.

They are there when a compiler was at the installation. Without it, or with MODELSERVER_PURE_PYTHON=1 in the
environment, torch does the same in more and slower steps. Whoever asks decides when a network is built, so that no step
asks.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Mapping
from types import ModuleType

import torch

from modelserver.backend import load_extension

logger = logging.getLogger(__name__)

# The lowest compute capability that multiplies bfloat16, and that Triton supports.
AMPERE = 8
_DTYPES = (torch.float32, torch.bfloat16)
# With AVX2 our product of float32 takes 0.4x of oneDNN's time for one row, 0.6x for 8 and 32, and 1.0x for 256
# (measured). With AVX-512 it was not measured.
_FASTER_THAN_ONEDNN = ("avx2", "avxvnni")


def load(environment: Mapping[str, str], name: str = "_kernels") -> ModuleType | None:
    """A module in C; None where torch does its work."""
    return load_extension(f"{__package__}.{name}", environment)


KERNELS = load(os.environ)
PACKED_KERNELS = load(os.environ, "_packed_linear")


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module, if it computes on tensors like these."""
    return KERNELS if device.type == "cpu" and dtype in _DTYPES else None


def packed_kernels_for(device: torch.device) -> ModuleType | None:
    """The module of products with packed weights, if it computes on this device."""
    return PACKED_KERNELS if device.type == "cpu" else None


@functools.cache
def has_triton() -> bool:
    """Whether this process can run kernels in Triton on a GPU. Some of its versions compile a part of themselves with
    the machine's C compiler, before they compile any kernel."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # whatever Triton lacks, torch computes instead
        logger.warning(
            "kernels in Triton cannot run here, and torch's are slower; Triton may need gcc and Python's headers: %s",
            error,
        )
        return False
    return True


def device_processors(device: torch.device) -> int | None:
    """How many processors a GPU has for kernels in Triton; None where these do not compute."""
    if device.type != "cuda" or not has_triton():
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major >= AMPERE else None


def has_fast_packed_kernels(device: torch.device) -> bool:
    """Whether these have instructions of the processor's own; without them torch multiplies floats faster."""
    kernels = packed_kernels_for(device)
    return kernels is not None and kernels.instructions()[0] != "generic"


def multiplies_floats_fastest(device: torch.device) -> bool:
    """Whether these multiply weights in float32 faster than torch does."""
    kernels = packed_kernels_for(device)
    return kernels is not None and kernels.instructions()[0] in _FASTER_THAN_ONEDNN

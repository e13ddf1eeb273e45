"""Errors of a GPU after which CUDA answers every call of this process with the same error, until the process ends.

An illegal access, or an assertion in a kernel such as an index out of range, ends the CUDA context of the process
(CUDA's runtime API calls these errors non-recoverable; Triton's and torch's own documents say to restart). Code that
catches an error of a library passes it to `note_device_error`. A child process that has lost its GPU ends after the
batch, and is started again; the server's own process reports that it is not live, for whoever restarts it.
"""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

# CUDA's descriptions of the errors that stay (cudaGetErrorString, codes 214, 220 and 700 to 719), which every library
# quotes. Running out of memory, and a call that CUDA refuses, do not stay.
_LASTING: Final = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
)


class _Loss:
    """What this process knows. It is written once, and read from any thread."""

    reason = ""


def note_device_error(error: BaseException) -> bool:
    """Whether an error that a library raised in this process means that its GPU is lost; if so, remember it."""
    text = str(error)
    if "cuda" not in f"{type(error).__name__} {text}".lower():
        return False
    found = next((reason for reason in _LASTING if reason in text), None)
    if found is None:
        return False
    if not _Loss.reason:
        logger.error("this process has lost its GPU, and has to be started again: CUDA says '%s'", found)
        _Loss.reason = found
    return True


def device_loss() -> str:
    """CUDA's words for the error that ended the use of the GPU in this process; empty if there was none."""
    return _Loss.reason

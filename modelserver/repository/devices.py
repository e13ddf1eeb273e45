"""The devices of this machine that models may be placed on."""

from __future__ import annotations

from pathlib import Path

DEVICE_FILES = Path("/dev")


def gpu_ids() -> tuple[int, ...]:
    """The NVIDIA GPUs that this process can open, by their device files; no driver library is asked."""
    numbers = (path.name.removeprefix("nvidia") for path in DEVICE_FILES.glob("nvidia[0-9]*"))
    return tuple(sorted(int(number) for number in numbers if number.isdigit()))

"""`--model-load-gpu-limit`: the use of a GPU's memory up to which models are loaded on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelserver.core.numerals import parse_float
from modelserver.errors import InvalidArgumentError

_FLAG = "--model-load-gpu-limit"


def parse_gpu_limits(texts: Sequence[str]) -> Mapping[int, float]:
    """The fraction of memory, 0 to 1, by device, from repeated `DEVICE:FRACTION`.

    Raises InvalidArgumentError for invalid text, or a device given twice.
    """
    limits: dict[int, float] = {}
    for text in texts:
        device, _, share = text.partition(":")
        try:
            fraction = parse_float(share)
        except ValueError:
            fraction = -1.0
        if not (device.isascii() and device.isdecimal() and 0 <= fraction <= 1):
            raise InvalidArgumentError(
                f"{_FLAG} expects DEVICE:FRACTION, as 0:0.8, with a share of 0 to 1, got '{text}'"
            )
        if int(device) in limits:
            raise InvalidArgumentError(f"{_FLAG}={text}: this device is given twice; leave one out")
        limits[int(device)] = fraction
    return limits

"""TensorRT engines without TensorRT: descriptions for what decides by them, and plans that have only a header."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelserver_backends.tensorrt.engine_info import EngineInfo, IoTensor, Range

from modelserver.backend import BackendContext, Datatype, ModelConfig
from modelserver.config.pbtxt import parse_pbtxt

MAGICS = {"tensorrt": b"ftrt", "tensorrt_rtx": b"vtrt"}


def plan_bytes(
    flavour: str = "tensorrt", version: Sequence[int] = (10, 9, 0, 34), *, size: int = 256, mask: int = 0b111110
) -> bytes:
    """A plan of `size` bytes that says so, as the libraries write it, and holds nothing."""
    head = struct.pack("<4sIQQ4B", MAGICS[flavour], 0, 2, size, *version)
    if flavour == "tensorrt_rtx":
        head += struct.pack("<4sQ", b"vtrt", mask)
    return head.ljust(size, b"\0")


def tensor(name: str, *dims: int, kind: str = "FP32", is_shape: bool = False) -> IoTensor:
    """An input if its name begins with "in", else an output."""
    return IoTensor(name, name.startswith("in"), Datatype(kind), dims, is_shape)


def engine(*tensors: IoTensor, profiles: Sequence[dict[str, Any]] = ()) -> EngineInfo:
    """An engine. A profile has (min, opt, max) for each input that needs one."""
    ranges = []
    for profile in profiles or ({},):
        found = {}
        for one in tensors:
            if one.is_input:
                bounds = profile.get(one.name, (one.dims,) * 3)
                found[one.name] = Range(*(tuple(bound) for bound in bounds))
        ranges.append(found)
    return EngineInfo(tensors, tuple(ranges))


def batching_engine(largest: int = 8, size: int = 16) -> EngineInfo:
    """in [-1, size] -> out [-1, size], for 1 to `largest` rows."""
    bounds = ((1, size), (largest // 2 or 1, size), (largest, size))
    return engine(tensor("in", -1, size), tensor("out", -1, size), profiles=[{"in": bounds}])


def context_with(text: str = "", directory: Path = Path("m"), **fields: Any) -> BackendContext:
    """A context whose config.pbtxt is `text`."""
    config = parse_pbtxt(text, "config.pbtxt").config if text else ModelConfig(name=directory.name)
    return BackendContext(directory.name, 1, config, directory, directory / "1", **fields)

"""Models that are held, in a server of another process too: their load, or their batches, until a file is there."""

from __future__ import annotations

from pathlib import Path

from support.gate import BACKEND_DIRECTORY
from support.model_files import write_model

# What the server must be told, as a flag.
LATCHES = f"--backend-directory={BACKEND_DIRECTORY}"

_CONFIG = """
backend: "latch"
max_batch_size: 1
input [ {{ name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "{held}" value {{ string_value: "{latch}" }} }}
"""


class Latch:
    """Closed, until somebody opens it for good."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        self._path.touch()


def write_latched(repository: Path, name: str = "identity", *, held: str) -> Latch:
    """An identity model whose "load", or each "batch", is held; what lets it go on."""
    path = repository / name / "latch"
    write_model(repository, name, _CONFIG.format(held=held, latch=path))
    return Latch(path)

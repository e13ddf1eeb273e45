"""Models that are held, in a server of another process too: their load, or their batches, until a file is there."""

from __future__ import annotations

from pathlib import Path

from support.gate import BACKEND_DIRECTORY
from support.model_files import write_model
from support.serving import RunningServer

# What the server must be told, as a flag.
LATCHES = f"--backend-directory={BACKEND_DIRECTORY}"

_CONFIG = """
backend: "latch"
max_batch_size: {max_batch_size}
input [ {{ name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "{held}" value {{ string_value: "{latch}" }} }}
{more}
"""


class Latch:
    """Closed, until somebody opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        self._path.touch()

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    @property
    def is_reached(self) -> bool:
        """Whether somebody has come to it."""
        return self._path.with_name("reached").exists()


def write_latched(
    repository: Path, name: str = "identity", *, held: str, max_batch_size: int = 1, more: str = ""
) -> Latch:
    """An identity model whose "load", or each "batch", is held; what lets it go on. `more` is text of config.pbtxt."""
    path = repository / name / "latch"
    write_model(repository, name, _CONFIG.format(held=held, latch=path, max_batch_size=max_batch_size, more=more))
    return Latch(path)


def latch_of(server: RunningServer, name: str) -> Latch:
    """That of a model in the only repository of a server."""
    (repository,) = server.server.options.model_repository
    return Latch(Path(repository) / name / "latch")

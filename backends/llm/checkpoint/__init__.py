"""Checkpoints: what was trained, in whatever files it lies. No torch is imported before tensors are read."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoint, TokenizerFiles, config_path, text_config
from .gguf import SUFFIX, GgufCheckpoint, UnreadGguf, find_gguf
from .gguf_file import GgufFile
from .hf import CONFIG, HfCheckpoint

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "HfCheckpoint",
    "TokenizerFiles",
    "UnreadGguf",
    "config_path",
    "find_gguf",
    "is_gguf",
    "is_projector",
    "open_checkpoint",
    "text_config",
]


def open_checkpoint(place: Path) -> Checkpoint:
    """The checkpoint at a path, in the format that it has. Nothing is read yet: what is missing shows when it is used.

    A GGUF file, a directory in the layout of Hugging Face, or one without a config.json that holds a GGUF file.
    InvalidArgumentError for a directory with several of these.
    """
    if is_gguf(place):
        return GgufCheckpoint(place)
    if not (place / CONFIG).is_file() and (found := find_gguf(place)) is not None:
        return GgufCheckpoint(found)
    return HfCheckpoint(place)


def is_projector(path: Path) -> bool:
    """Whether a path is the GGUF file of what sees pictures beside a language model. InvalidArgumentError for a broken
    one."""
    return is_gguf(path) and path.is_file() and GgufFile(path).text("general.architecture") == "clip"


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file's, by its name."""
    return path.suffix == SUFFIX and not path.is_dir()

"""Checkpoints: what was trained, in whatever files it lies. No torch is imported before tensors are read."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoint, TokenizerFiles, text_config
from .hf import HfCheckpoint

__all__ = ["Checkpoint", "HfCheckpoint", "TokenizerFiles", "open_checkpoint", "text_config"]


def open_checkpoint(place: Path) -> Checkpoint:
    """The checkpoint at a path, in the format that it has. Nothing is read yet: what is missing shows when it is used.

    A directory in the layout of Hugging Face is the only format so far.
    """
    return HfCheckpoint(place)

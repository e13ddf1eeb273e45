"""The digits as sample files of the toolkit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.digits import held_out, training_set


def write_digit_samples(directory: Path, *, num_training: int = 128, num_held_out: int = 120) -> tuple[Path, Path]:
    """`training.npz` and `held_out.npz` with `image` and `labels`."""
    paths = directory / "training.npz", directory / "held_out.npz"
    for path, (images, labels), count in zip(
        paths, (training_set(), held_out()), (num_training, num_held_out), strict=True
    ):
        np.savez(path, image=images[:count], labels=labels[:count])
    return paths

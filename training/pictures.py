"""A few held-out digits as PNG files, for the README and for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from training.digits import held_out

SCALE = 8


def write_pictures(directory: Path) -> None:
    """Gray 64x64 pictures `digit-<label>.png`, one of each digit, `digit-7-8x8.png` as it was scanned.

    `digit-3.npy` is a 3 as the models take it: FP32 [1, 8, 8].
    """
    directory.mkdir(parents=True, exist_ok=True)
    images, labels = held_out()
    for label in range(10):
        pixels = np.rint(images[labels == label][0] * 255).astype(np.uint8)
        picture = Image.fromarray(pixels)
        if label == 3:
            np.save(directory / "digit-3.npy", images[labels == label][:1])
        if label == 7:
            picture.save(directory / "digit-7-8x8.png", optimize=True)
        picture = picture.resize((8 * SCALE, 8 * SCALE), Image.Resampling.NEAREST)
        picture.save(directory / f"digit-{label}.png", optimize=True)

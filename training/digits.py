"""Handwritten digits: scikit-learn's bundled data set, split once and for all.

1,797 images of 8x8 pixels; ink is bright, paper dark. Pixels are scaled from 0..16 to 0..1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0


def _split() -> tuple[Array, Array, Array, Array]:
    from sklearn.datasets import load_digits  # takes seconds to import
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=HELD_OUT_SHARE, random_state=SPLIT_SEED, stratify=labels
    )
    return train_images, train_labels, test_images, test_labels


def training_set() -> tuple[Array, Array]:
    """Images FP32 [n, 8, 8] in 0..1 and labels INT64 [n] that the models were trained on."""
    return _split()[:2]


def held_out() -> tuple[Array, Array]:
    """360 images FP32 [n, 8, 8] in 0..1 and labels INT64 [n] that no model has seen."""
    return _split()[2:]

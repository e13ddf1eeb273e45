"""Models of model_repository/ in 8-bit integers, by `modelserver quantize`, calibrated on training images."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from modelserver.toolkit.conversion import Outcome
from modelserver.toolkit.onnx_quantize import OnnxQuantizeOptions
from modelserver.toolkit.quantization import Method, QuantizationOptions, quantize
from modelserver.toolkit.sample_files import SampleOptions
from training.digits import held_out, training_set


def write_integers(source: Path, path: Path) -> Outcome:
    """The ONNX model of directory `source` in int8 at `path`; how it compares on images that neither has seen."""
    with tempfile.TemporaryDirectory() as directory:
        calibration, samples = write_samples(Path(directory))
        options = QuantizationOptions(
            source=str(source),
            output=Path(directory) / "made",
            method=Method.STATIC,
            calibration=calibration,
            onnx=OnnxQuantizeOptions(is_static=True, reduce_range=True),  # as right on every CPU
            samples=SampleOptions(samples, measure_s=0.0),
        )
        outcome = quantize(options, print)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.output / "1" / "model.onnx", path)
    return outcome


def write_samples(directory: Path) -> tuple[Path, Path]:
    """`training.npz` and `held_out.npz`: the digits as the toolkit takes them."""
    paths = directory / "training.npz", directory / "held_out.npz"
    for path, (images, labels) in zip(paths, (training_set(), held_out()), strict=True):
        np.savez(path, image=images, labels=labels)
    return paths


if __name__ == "__main__":
    for written in write_samples(Path()):
        print(written)

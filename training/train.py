"""Train every digit model of model_repository/ from scratch: `python -m training.train` (about a minute on a CPU).

Seeds are fixed: running it again on the same machine writes the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from training.digits import held_out, training_set
from training.export import write_exported_program, write_onnx, write_torchscript
from training.integers import write_integers
from training.networks import Convolution, Perceptron, accuracy, train
from training.pictures import write_pictures

ROOT = Path(__file__).parents[1]
REPOSITORY = ROOT / "model_repository"
MAX_BATCH = 64

Network = TypeVar("Network", bound=nn.Module)


def trained(name: str, network: Network, *, epochs: int, peak_rate: float = 3e-3, shift: bool = True) -> Network:
    """`network` after training; prints its accuracy on images that it has not seen."""
    train(network, *training_set(), epochs=epochs, peak_rate=peak_rate, shift=shift)
    print(f"{name:24} held-out accuracy {accuracy(network, *held_out()):.2%}")
    return network


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    perceptron = trained("digits_onnx", Perceptron(128, 128), epochs=60)
    for name in ("digits_onnx", "digits_tensorrt"):
        write_onnx(perceptron, REPOSITORY / name / "1/model.onnx")
    integers = write_integers(REPOSITORY / "digits_onnx", REPOSITORY / "digits_int8/1/model.onnx").comparison
    print(f"{'digits_int8':24} held-out accuracy {integers.accuracy_after:.2%}")

    convolution = trained("digits (convolution)", Convolution(), epochs=30)
    write_torchscript(convolution, REPOSITORY / "digits_torchscript/1/model.pt")
    write_exported_program(convolution, REPOSITORY / "digits_export/1/model.pt2", max_batch=MAX_BATCH)

    # Three steps of one model's history, served under three version policies.
    history = [
        trained("version 1 (logistic)", Perceptron(), epochs=60, peak_rate=3e-2, shift=False),
        trained("version 2 (16 units)", Perceptron(16), epochs=60, peak_rate=1e-2, shift=False),
        trained("version 3 (64 units)", Perceptron(64), epochs=120, peak_rate=1e-2),
    ]
    for name in ("digits_versions", "digits_versions_specific", "digits_versions_all"):
        for version, network in enumerate(history, start=1):
            write_onnx(network, REPOSITORY / name / str(version) / "model.onnx")

    write_pictures(ROOT / "docs/images")


if __name__ == "__main__":
    main()

"""The networks that read digits, and the loop that trains one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from training.digits import Array


class Perceptron(nn.Module):
    """Images [n, 8, 8] -> logits [n, 10] through fully connected layers; no hidden layer is logistic regression."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        widths = [64, *hidden, 10]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.flatten(1)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class Convolution(nn.Module):
    """Images [n, 8, 8] -> logits [n, 10] through two convolutions and one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.second = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(image.unsqueeze(1)))
        x = torch.max_pool2d(torch.relu(self.second(x)), 2)
        x = torch.relu(self.hidden(x.flatten(1)))
        return self.last(x)


def train(
    network: nn.Module, images: Array, labels: Array, *, epochs: int, peak_rate: float = 3e-3, shift: bool = True
) -> None:
    """Train in place, the rate rising to `peak_rate` and falling; `shift` also shows images moved by a pixel."""
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(network.parameters(), lr=peak_rate, weight_decay=1e-2)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak_rate, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            batch = x[rows]
            if shift:
                batch = _shifted(batch)
            loss = nn.functional.cross_entropy(network(batch), y[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    network.eval()


def _shifted(batch: torch.Tensor) -> torch.Tensor:
    """Each image moved by -1, 0 or 1 pixels in both directions, most of them not at all."""
    moves = torch.tensor([0, 0, 0, 1, -1])
    padded = nn.functional.pad(batch, (1, 1, 1, 1))
    down, right = moves[torch.randint(5, (2, len(batch)))]
    rows = torch.arange(8) + 1 + down[:, None]
    columns = torch.arange(8) + 1 + right[:, None]
    return padded[torch.arange(len(batch))[:, None, None], rows[:, :, None], columns[:, None, :]]


def accuracy(network: nn.Module, images: Array, labels: Array) -> float:
    """Share of images whose largest logit is the label."""
    with torch.inference_mode():
        predicted = network(torch.from_numpy(images)).argmax(1).numpy()
    return float(np.mean(predicted == labels))

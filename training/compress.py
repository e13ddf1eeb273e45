"""Smaller digits models, by pruning and by distillation: `python -m training.compress DIRECTORY` (docs/compression.md).

Ends in three models that serve: `digits_large`, `digits_pruned` and `digits_distilled`. Seeds are fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from modelserver.toolkit.comparison import Comparison, compare, summary_rows
from modelserver.toolkit.loaded_model import LoadedModel
from modelserver.toolkit.model_directory import model_bytes, new_model_directory
from modelserver.toolkit.samples import Samples
from training.digits import Array, held_out, training_set
from training.export import write_onnx
from training.networks import Convolution, Perceptron, accuracy, train

CONFIG = """# {text} Made by training/compress.py.
backend: "onnxruntime"
max_batch_size: 64
dynamic_batching {{ }}
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long is trained, in epochs; half of the neurons go in each of `num_cuts` rounds of pruning."""

    large_epochs: int = 60
    repair_epochs: int = 20
    num_cuts: int = 2
    teacher_epochs: int = 30
    student_epochs: int = 80
    measure_s: float = 1.0


def prune(network: Perceptron, share: float) -> Perceptron:
    """A network with the most important `share` of each hidden layer's neurons, their weights as they were.

    A neuron is as important as the weights that lead in are large, times those that lead out. Whole neurons go, not
    single weights: what is left is a smaller matrix, which every server computes faster.
    """
    layers = list(network.layers)
    keep = [torch.arange(layers[0].in_features)]
    for layer, following in pairwise(layers):
        importance = layer.weight.norm(dim=1) * following.weight.norm(dim=0)
        num_kept = max(1, round(share * layer.out_features))
        keep.append(importance.argsort(descending=True)[:num_kept].sort().values)
    keep.append(torch.arange(layers[-1].out_features))
    smaller = Perceptron(*(len(rows) for rows in keep[1:-1]))
    with torch.no_grad():
        for place, layer in enumerate(smaller.layers):
            rows, columns = keep[place + 1], keep[place]
            layer.weight.copy_(layers[place].weight[rows][:, columns])
            layer.bias.copy_(layers[place].bias[rows])
    return smaller


def distill(teacher: nn.Module, student: nn.Module, images: Array, *, epochs: int, temperature: float = 4.0) -> None:
    """Train `student` in place to give what `teacher` gives, doubts included; labels are not needed.

    Softened by `temperature`, small probabilities count: they tell which digits look alike.
    """
    x = torch.from_numpy(images)
    teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * -(-len(x) // 64))
    student.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            # Images between two digits, too: the teacher has an opinion of anything, so data costs nothing.
            batch = torch.lerp(x[rows], x[torch.randint(len(x), (len(rows),))], 0.3 * torch.rand(len(rows), 1, 1))
            with torch.no_grad():
                wanted = torch.softmax(teacher(batch) / temperature, dim=1)
            loss = nn.functional.kl_div(
                torch.log_softmax(student(batch) / temperature, dim=1), wanted, reduction="batchmean"
            )
            optimizer.zero_grad()
            (loss * temperature**2).backward()
            optimizer.step()
            schedule.step()
    student.eval()


def pruned(recipe: Recipe, say: Callable[[str], None]) -> tuple[Perceptron, Perceptron]:
    """A large network, and a small one that was cut out of it, a part at a time."""
    images, labels = training_set()
    large = Perceptron(128, 128)
    train(large, images, labels, epochs=recipe.large_epochs)
    say(f"large: 128 + 128 neurons, {accuracy(large, *held_out()):.2%} of held-out images are read right")
    small = large
    for _ in range(recipe.num_cuts):
        small = prune(small, 0.5)
        before = accuracy(small, *held_out())
        train(small, images, labels, epochs=recipe.repair_epochs)
        widths = " + ".join(str(layer.out_features) for layer in small.layers[:-1])
        say(f"pruned to {widths} neurons: {before:.2%}, trained again: {accuracy(small, *held_out()):.2%}")
    return large, small


def distilled(recipe: Recipe, say: Callable[[str], None]) -> Perceptron:
    """A small network that has learnt from a convolution."""
    images, labels = training_set()
    teacher = Convolution()
    train(teacher, images, labels, epochs=recipe.teacher_epochs)
    alone, student = Perceptron(32), Perceptron(32)
    train(alone, images, labels, epochs=recipe.student_epochs, peak_rate=1e-2)
    distill(teacher, student, images, epochs=recipe.student_epochs)
    say(f"teacher: {accuracy(teacher, *held_out()):.2%}")
    say(f"32 neurons that learnt from labels: {accuracy(alone, *held_out()):.2%}")
    say(f"32 neurons that learnt from the teacher: {accuracy(student, *held_out()):.2%}")
    return student


def publish(network: Perceptron, directory: Path, text: str) -> None:
    """A model directory that serves, in place of one of the name."""
    with new_model_directory(directory, force=True) as made:
        write_onnx(network, made / "1" / "model.onnx")
        (made / "config.pbtxt").write_text(CONFIG.format(text=text))


def compare_directories(before: Path, after: Path, measure_s: float) -> Comparison:
    """Both as they serve, on held-out images."""
    images, labels = held_out()
    sizes = (model_bytes(before / "1"), model_bytes(after / "1"))
    with LoadedModel.open(before) as one, LoadedModel.open(after) as other:
        return compare(one, other, Samples({"image": images}, labels), sizes=sizes, measure_s=measure_s)


def run(repository: Path, recipe: Recipe, say: Callable[[str], None] = print) -> dict[str, Comparison]:
    """Make the three models in `repository`; what the small ones are beside the large one, by name."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    large, small = pruned(recipe, say)
    student = distilled(recipe, say)
    publish(large, repository / "digits_large", "A perceptron of 128 and 128 hidden neurons.")
    publish(small, repository / "digits_pruned", "What is left of digits_large after pruning.")
    publish(student, repository / "digits_distilled", "32 hidden neurons that learnt from a convolution.")
    found = {}
    for name in ("digits_pruned", "digits_distilled"):
        found[name] = compare_directories(repository / "digits_large", repository / name, recipe.measure_s)
        say(f"{name}, beside digits_large:")
        for what, before, after, change in summary_rows(found[name]):
            say(f"  {what:24} {before:>10} -> {after:>10}  {change}")
    say(f"modelserver serve {repository}")
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make small digits models by pruning and distillation.")
    parser.add_argument("repository", type=Path, help="The directory that they are written to; made if need be.")
    run(parser.parse_args(words).repository, Recipe())


if __name__ == "__main__":
    main()

"""Pruning and distillation end in smaller models that serve."""

from pathlib import Path

import torch

from training.compress import Recipe, prune, run
from training.digits import held_out
from training.networks import Perceptron


def test_pruning_keeps_the_neurons_that_matter() -> None:
    torch.manual_seed(0)
    network = Perceptron(6, 4).eval()
    with torch.no_grad():
        # Half of the neurons do nothing.
        network.layers[0].weight[::2] = 0
        network.layers[0].bias[::2] = 0
        network.layers[1].weight[::2] = 0
        network.layers[1].bias[::2] = 0
    smaller = prune(network, 0.5)
    assert [layer.out_features for layer in smaller.layers] == [3, 2, 10]
    images = torch.from_numpy(held_out()[0])
    torch.testing.assert_close(smaller(images), network(images))


def test_it_ends_in_models_that_serve(tmp_path: Path) -> None:
    torch.manual_seed(0)
    said: list[str] = []
    recipe = Recipe(large_epochs=4, repair_epochs=2, num_cuts=1, teacher_epochs=2, student_epochs=4, measure_s=0.02)
    found = run(tmp_path, recipe, said.append)
    assert set(found) == {"digits_pruned", "digits_distilled"}
    for comparison in found.values():
        assert comparison.after_bytes < 0.6 * comparison.before_bytes
        assert comparison.accuracy_after is not None
        assert comparison.accuracy_after > 0.5
    assert any("pruned to 64 + 64 neurons" in line for line in said)

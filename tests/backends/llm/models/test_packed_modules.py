"""Linear layers of networks of transformers, packed where that changes nothing."""

from __future__ import annotations

import torch
from modelserver_backends.llm.models.packed_modules import PackedModule, pack_linears
from torch import nn


class Network(nn.Module):
    """`reads_weight`: it multiplies by a weight itself, beside calling the layer."""

    def __init__(self, *, reads_weight: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)
        self.unused, self.head = nn.Linear(256, 256), nn.Linear(256, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.up
        self._reads_weight = reads_weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        hidden = self.down(torch.relu(self.again(self.up(hidden)[..., :256])))
        if self._reads_weight:
            hidden = hidden @ self.down.weight[:, :256]
        assert self.down.weight.dtype is torch.float32
        return self.head(hidden)


def test_layers_that_are_called_are_packed_and_give_the_same() -> None:
    network, ids = Network(), torch.arange(24).view(2, 12)
    with torch.inference_mode():
        expected = network(ids)
        pack_linears(network, lambda: network(ids[:1, :3]))
        torch.testing.assert_close(network(ids), expected, atol=1e-4, rtol=1e-4)
        assert network(ids[:0]).shape == (0, 12, 300)
    kinds = {name: type(module) for name, module in network.named_children()}
    assert kinds == {
        "embedding": nn.Embedding,
        "up": PackedModule,
        "down": PackedModule,
        "unused": nn.Linear,
        "head": nn.Linear,
    }
    assert network.again is network.up


def test_a_network_that_reads_weights_itself_stays_as_it_is() -> None:
    network, ids = Network(reads_weight=True), torch.arange(6).view(1, 6)
    with torch.inference_mode():
        expected = network(ids)
        pack_linears(network, lambda: network(ids))
        assert torch.equal(network(ids), expected)
    assert not any(isinstance(module, PackedModule) for module in network.modules())

"""Where blocks lie, and what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from modelserver_backends.llm.attention.choose import make_attention
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvGroup, KvLayout
from modelserver_backends.llm.attention.paged import AttentionSpec
from modelserver_backends.llm.kv_memory import reserve_kv_memory
from modelserver_backends.llm.options import EngineOptions

from modelserver.backend import UnsupportedError

CPU = torch.device("cpu")
# Layers 0 and 2 have latent attention, layer 1 has heads in 8 bits with a scale for each key and each value.
LATENT = KvGroup(layers=(0, 2), num_heads=1, key_width=512 + 64, value_width=0, shared_width=512, dtype=torch.bfloat16)
SCALED = KvGroup(layers=(1,), num_heads=2, key_width=16, value_width=8, dtype=torch.int8, num_scales=2)


def test_a_block_over_all_layers_is_one_piece() -> None:
    layout = KvLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    blocks = KvBlocks(layout, num_blocks=5, block_size=8, device=CPU)
    for number, layer in enumerate(blocks.layers):
        layer[2] = number + 1.0
    (piece,) = blocks.pieces(2)
    assert piece.is_contiguous()
    assert piece.nbytes == layout.block_bytes(8) == 3 * 8 * 2 * 2 * 4 * 4
    assert piece.view(torch.float32).mean(dim=1).tolist() == [1.0, 2.0, 3.0]
    # Copied to another place, it is the same block there.
    blocks.pieces(4)[0].copy_(piece)
    assert all(torch.equal(layer[4], layer[2]) and not layer[3].any() for layer in blocks.layers)


def test_groups_take_what_their_layers_keep() -> None:
    assert LATENT.block_bytes(16) == 2 * 16 * 576 * 2
    assert SCALED.block_bytes(16) == 16 * 2 * (16 + 8 + 2 * 4)
    layout = KvLayout((LATENT, SCALED))
    options = EngineOptions(block_size=16, num_gpu_blocks_override=3)
    memory = reserve_kv_memory(layout, options, max_model_len=16, device=CPU, what="it")
    assert memory.reservation.num_bytes == 3 * (LATENT.block_bytes(16) + SCALED.block_bytes(16))
    assert [piece.shape for piece in memory.blocks.pieces(1)] == [(2, 16 * 576 * 2), (1, 1024)]
    memory.reservation.release()


@pytest.mark.parametrize("groups", [(replace(LATENT, num_heads=2),), (SCALED,), (LATENT, replace(LATENT, layers=(1,)))])
def test_a_layout_that_attention_does_not_read_is_refused(groups: tuple[KvGroup, ...]) -> None:
    blocks = KvBlocks(KvLayout(groups), num_blocks=2, block_size=4, device=CPU)
    with pytest.raises(UnsupportedError, match="one group of layers"):
        make_attention("auto", blocks, AttentionSpec(num_heads=2, windows=(None,), scale=1.0))

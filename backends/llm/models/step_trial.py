"""Steps over a few tokens as they come in service: several sequences in one, each from its own position on, and layers
that keep states going on from them.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from ..attention.chunked import make_sdpa
from ..attention.kv_blocks import KvBlocks, KvLayout
from ..attention.spec import AttentionSpec
from ..plan import Chunk
from ..sampling_params import SamplingParams
from ..sequence import Sequence
from ..step_context import StepContext
from ..step_inputs import StepInputs
from .attention_trial import check_equal
from .recurrent_states import RecurrentStates

_LENS = (11, 8)
# Of each step, what the two sequences add: a beginning, a chunk that goes on beside a first token, two chunks, a token
# beside a chunk, and a token of each. Most tokens are elsewhere in their step than in their sequence.
_STEPS = (
    ((0, 0, 4),),
    ((0, 4, 3), (1, 0, 1)),
    ((0, 7, 2), (1, 1, 4)),
    ((0, 9, 1), (1, 5, 2)),
    ((0, 10, 1), (1, 7, 1)),
)
_BLOCK_SIZE = 16


class TriedNetwork(Protocol):
    """What is tried out: `own_logits` are those of the model's own computation."""

    device: torch.device

    def __call__(self, input_ids: torch.Tensor, step: StepContext, /) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor: ...


def check_steps(
    network: TriedNetwork, states: RecurrentStates | None, spec: AttentionSpec, kv_layout: KvLayout
) -> None:
    """UnsupportedError, if logits differ from those of the model's own computation of each sequence as a whole."""
    device = network.device
    if states is not None:
        states.allocate(len(_LENS))
    block_size = math.gcd(_BLOCK_SIZE, *(chunk for chunk in spec.chunks if chunk is not None))
    each = -(-max(_LENS) // block_size)
    blocks = KvBlocks(kv_layout, num_blocks=1 + len(_LENS) * each, block_size=block_size, device=device)
    attention = make_sdpa(blocks, spec)
    sequences = [
        Sequence(slot, list(range(length)), length, SamplingParams(), slot=slot, block_ids=block_ids)
        for slot, length in enumerate(_LENS)
        for block_ids in [list(range(1 + slot * each, 1 + slot * each + each))]
    ]
    found: dict[int, list[torch.Tensor]] = {sequence.seq_id: [] for sequence in sequences}
    for chunks in _STEPS:
        planned = [Chunk(sequences[slot], start, count, num_sampled=1) for slot, start, count in chunks]
        step = StepInputs(planned, block_size)
        ids, positions = (torch.from_numpy(rows).to(device) for rows in (step.input_ids, step.positions))
        context = StepContext(
            positions=positions,
            attention=attention,
            inputs=attention.prepare(step.batch),
            state_groups=() if states is None else states.group(step.sequence_slots, step.batch),
        )
        logits = network.logits(network(ids, context))
        parts = logits.split(step.batch.num_queries.tolist())
        for sequence, part in zip(step.sequences, parts, strict=True):
            found[sequence.seq_id].append(part)
    expected = [network.own_logits(torch.tensor(sequence.token_ids, device=device)) for sequence in sequences]
    check_equal(
        torch.cat([torch.cat(found[sequence.seq_id]) for sequence in sequences]),
        torch.cat(expected),
        is_exact=kv_layout.dtype == torch.float32,
    )

"""Sequences that are computed as wholes, one behind the other in one pass, without the KV cache: texts to embed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .attention.chunked import ChunkedSdpa
from .attention.sdpa import SdpaAttention
from .models.recurrent_states import StateGroup
from .step_context import StepContext


def compute_fresh(
    network: Any,
    attention: SdpaAttention | ChunkedSdpa,
    token_id_lists: Sequence[Sequence[int]],
    device: torch.device,
    *,
    state_groups: tuple[StateGroup, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """The hidden states [tokens, hidden_size] of each list, none of them empty.

    `network` is that of a `LoadedNetwork`.
    """
    lengths = [len(token_ids) for token_ids in token_id_lists]
    input_ids = np.concatenate([np.asarray(token_ids, dtype=np.int64) for token_ids in token_id_lists])
    positions = np.concatenate([np.arange(length) for length in lengths])
    step = StepContext(
        positions=torch.from_numpy(positions).to(device),
        attention=attention,
        inputs=attention.prepare_fresh(lengths),
        state_groups=state_groups,
    )
    hidden: torch.Tensor = network(torch.from_numpy(input_ids).to(device), step)
    parts: tuple[torch.Tensor, ...] = torch.split(hidden, lengths)
    return parts

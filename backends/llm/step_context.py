"""One step as a network sees it: the facts about its rows that layers and linear layers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .attention.chunked import ChunkedSdpa
    from .attention.paged import PagedAttention, Rotation
    from .attention.sdpa import SdpaAttention
    from .lora.step import StepAdapters
    from .models.recurrent_states import StateGroup
    from .pictures.step import StepPictures


@dataclass(slots=True)
class Taps:
    """The states [tokens, hidden_size] before each of some layers of the network, which the decoder adds in order."""

    layers: frozenset[int]
    found: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Passed from the network to each layer and each linear layer, whose rows are the step's tokens in their order.

    `positions` [tokens] are those of the tokens in their sequences; [3, tokens] where those of pictures differ by time,
    height and width. `inputs` is what `attention` has prepared of the step. `state_groups` says which rows belong to
    which slot of recurrent states; it is empty where no layer keeps any. `pictures` are rows that come from embeddings
    in place of token ids; None without any. `rotations` has the step's cosines and sines for each kind of rotation; the
    decoder sets it. `adapters` says which rows belong to which adapter; None where no row has any. `taps` collects
    states between layers for speculation; None where nothing reads them.

    A feature that depends on rows adds a field here.
    """

    positions: torch.Tensor
    attention: PagedAttention
    inputs: Any
    state_groups: tuple[StateGroup, ...] = ()
    rotations: tuple[Rotation, ...] = ()
    pictures: StepPictures | None = None
    adapters: StepAdapters | None = None
    taps: Taps | None = None


def compute_fresh(
    network: Any,
    attention: SdpaAttention | ChunkedSdpa,
    token_id_lists: Sequence[Sequence[int]],
    device: torch.device,
    *,
    state_groups: tuple[StateGroup, ...] = (),
    adapters: StepAdapters | None = None,
) -> tuple[torch.Tensor, ...]:
    """The hidden states [tokens, hidden_size] of each list, none of them empty: texts to embed.

    The lists are computed as wholes, in one pass, without the KV cache.

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
        adapters=adapters,
    )
    hidden: torch.Tensor = network(torch.from_numpy(input_ids).to(device), step)
    parts: tuple[torch.Tensor, ...] = torch.split(hidden, lengths)
    return parts

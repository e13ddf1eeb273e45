"""One step as a network sees it. What layers and linear layers must know of their rows is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .attention.paged import PagedAttention, Rotation
    from .models.recurrent_states import StateGroup


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Passed from the network to each layer and each linear layer, whose rows are the step's tokens in their order.

    `positions` [tokens] are those of the tokens in their sequences. `inputs` is what `attention` has prepared of the
    step. `state_groups` says which rows belong to which slot of recurrent states; it is empty where no layer keeps any.
    `rotations` has the step's cosines and sines for each kind of rotation; the decoder sets it.

    A feature that depends on rows adds a field here: adapters and their rows, embeddings that replace token ids.
    """

    positions: torch.Tensor
    attention: PagedAttention
    inputs: Any
    state_groups: tuple[StateGroup, ...] = ()
    rotations: tuple[Rotation, ...] = ()

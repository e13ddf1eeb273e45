"""An encoder's network: transformers' own, which must be installed. Texts of a batch do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelserver.backend import UnavailableError

from ..checkpoint import Checkpoint
from ..models.pretrained import load_pretrained
from .recognition import ENCODER_DECODERS


@dataclass(frozen=True, slots=True)
class EncoderNetwork:
    """`model` is called with padded rows. `vocab_size` tokens have an embedding."""

    model: Any
    device: torch.device
    vocab_size: int
    pad_token_id: int

    def __call__(self, token_id_lists: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [rows, tokens, hidden_size], padded on the right, and the lengths [rows]."""
        lengths = torch.tensor([len(token_ids) for token_ids in token_id_lists])
        longest = int(lengths.max())
        input_ids = torch.full((len(token_id_lists), longest), self.pad_token_id)
        for row, token_ids in enumerate(token_id_lists):
            input_ids[row, : len(token_ids)] = torch.tensor(token_ids)
        mask = (torch.arange(longest) < lengths[:, None]).long()
        output = self.model(input_ids=input_ids.to(self.device), attention_mask=mask.to(self.device))
        return output.last_hidden_state, lengths.to(self.device)


def load_network(
    checkpoint: Checkpoint, model_type: str, *, dtype: torch.dtype, device: torch.device, pad_token_id: int | None
) -> EncoderNetwork:
    """UnavailableError without transformers; UnsupportedError for what it does not know; InvalidArgumentError for files
    that are damaged and weights that are missing. Code that comes with a checkpoint is not run, pickles are not read.
    """
    try:
        from transformers import AutoModel, AutoModelForTextEncoding
    except ImportError:
        raise UnavailableError(
            f"the {model_type} in {checkpoint.place} is an encoder, which runs on transformers' network: pip install "
            "transformers"
        ) from None
    checkpoint.names()  # raises for damaged files and for formats other than safetensors
    loader = AutoModelForTextEncoding if model_type in ENCODER_DECODERS else AutoModel
    # A pooler is for classes: nothing here looks at it.
    model = load_pretrained(loader, checkpoint, model_type, unused="pooler.", dtype=dtype, use_safetensors=True)
    config = model.config
    for given in (pad_token_id, config.pad_token_id, config.eos_token_id, 0):
        if isinstance(given, int) and 0 <= given < config.vocab_size:
            pad_token_id = given
            break
    assert pad_token_id is not None, "a vocabulary has a first token"
    return EncoderNetwork(model.eval().to(device), device, int(config.vocab_size), pad_token_id)

"""An encoder: texts to vectors, many at once. It knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from modelserver.backend import UnavailableError, UnsupportedError

from ..checkpoint import Checkpoint, text_config
from ..compute_thread import ComputeThread, choose_num_threads
from ..models.families.readers import stored_dtype
from ..models.load import choose_device, choose_dtype, choose_max_model_len
from ..models.pretrained import load_pretrained
from ..options import EngineOptions
from ..text.tokenizer import Tokenizer
from .head import EmbeddingHead, load_head
from .recognition import ENCODER_DECODERS, num_positions, usual_len


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


# The limit if neither the network nor the tokenizer has one: longer texts would exceed a step's memory anyway.
_LONGEST = 1 << 20


class Encoder:
    """`max_model_len` is the longest text, in tokens with the special ones. `embed` is called from one thread."""

    def __init__(
        self,
        network: EncoderNetwork,
        head: EmbeddingHead,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        num_threads: int | None = None,
    ) -> None:
        self.head = head
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = network.vocab_size
        self._network = network
        self._thread = ComputeThread(network.device, num_threads)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, options: EngineOptions) -> Encoder:
        """Raises ServerErrors that name the file or the option."""
        entries = text_config(checkpoint)
        model_type = str(entries["model_type"])
        if options.quantization is not None or options.tensor_parallel_size > 1:
            raise UnsupportedError(
                f"quantization and tensor_parallel_size are not supported for {model_type}, which is an encoder"
            )
        device = choose_device(options.device)
        positions = num_positions(entries)
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        network = load_network(
            checkpoint,
            model_type,
            dtype=choose_dtype(options.dtype, stored_dtype(entries), device),
            device=device,
            pad_token_id=tokenizer.pad_token_id,
        )
        head = load_head(checkpoint, options, default="mean", device=device)
        with torch.inference_mode():
            head(*network([[0]]))  # so that parts that do not fit together fail now
        return cls(
            network,
            head,
            tokenizer,
            max_model_len=choose_max_model_len(
                options.max_model_len, usual_len(entries, checkpoint), positions or _LONGEST
            ),
            num_threads=choose_num_threads(checkpoint, device, options),
        )

    def embed(self, token_id_lists: Sequence[Sequence[int]]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """A vector [size] per list, in one batch. Not normalised to unit length."""
        self._thread.settle()
        with torch.inference_mode():
            hidden, lengths = self._network(token_id_lists)
            return list(self.head(hidden, lengths).cpu().numpy())

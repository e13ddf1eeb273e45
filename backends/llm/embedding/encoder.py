"""An encoder: texts to vectors, many at once. It knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from modelserver.backend import UnsupportedError

from ..checkpoint import Checkpoint, text_config
from ..compute_thread import ComputeThread, choose_num_threads
from ..models.families.readers import stored_dtype
from ..models.load import choose_device, choose_dtype, choose_max_model_len
from ..options import EngineOptions
from ..text.tokenizer import Tokenizer
from .head import EmbeddingHead, load_head
from .network import EncoderNetwork, load_network
from .recognition import num_positions, usual_len

# Where neither a network nor a tokenizer has a limit: what a step's memory would not survive anyway.
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
            head(*network([[0]]))  # what does not fit together is said now
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

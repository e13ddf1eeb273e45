"""An encoder: texts to vectors, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from modelserver.backend import InferResponse, UnavailableError, UnsupportedError

from ..answer import embedded, token_rows
from ..checkpoint import Checkpoint, text_config
from ..compute_thread import ComputeThread, choose_num_threads
from ..contract import Operation
from ..models.families.readers import stored_dtype
from ..models.load import choose_device, choose_dtype, choose_max_model_len
from ..models.packed_modules import pack_linears
from ..models.pretrained import load_pretrained
from ..options import EngineOptions
from ..text.tokenizer import Tokenizer
from .head import EmbeddingHead, load_head
from .recognition import ENCODER_DECODERS, num_positions, usual_len
from .text_model import Text, TextModel

_TYPES = "token_type_ids"


@dataclass(frozen=True, slots=True)
class EncoderNetwork:
    """`model` is called with padded rows. `vocab_size` tokens have an embedding, and so have the types of tokens, if
    it `has_types`. `output` is what is taken of the model's."""

    model: Any
    device: torch.device
    vocab_size: int
    pad_token_id: int
    has_types: bool = False
    output: str = "last_hidden_state"

    @property
    def stretch(self) -> float:
        """See `TextModel`. A CPU multiplies a few rows as fast as many, so that it gains less by a batch than it loses
        by padding."""
        return 1.2 if self.device.type == "cpu" else 2.0

    def __call__(
        self, token_id_lists: Sequence[Sequence[int]], type_id_lists: Sequence[Sequence[int] | None] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [rows, tokens, hidden_size], padded on the right, and the lengths [rows].

        Of a model with a head its logits: [rows, labels], or [rows, tokens, labels].
        """
        lengths = torch.tensor([len(token_ids) for token_ids in token_id_lists])
        longest = int(lengths.max())
        input_ids = torch.full((len(token_id_lists), longest), self.pad_token_id)
        for row, token_ids in enumerate(token_id_lists):
            input_ids[row, : len(token_ids)] = torch.tensor(token_ids)
        mask = (torch.arange(longest) < lengths[:, None]).long()
        inputs = {"input_ids": input_ids.to(self.device), "attention_mask": mask.to(self.device)}
        if self.has_types and any(type_id_lists):
            types = torch.zeros_like(input_ids)
            for row, type_ids in enumerate(type_id_lists):
                if type_ids is not None:
                    types[row, : len(type_ids)] = torch.tensor(type_ids)
            inputs[_TYPES] = types.to(self.device)
        found: torch.Tensor = getattr(self.model(**inputs), self.output)
        return found, lengths.to(self.device)


def load_network(
    checkpoint: Checkpoint,
    options: EngineOptions,
    *,
    pad_token_id: int | None,
    loader: str | None = None,
    output: str = "last_hidden_state",
) -> EncoderNetwork:
    """`loader` is the Auto class of transformers that makes the network; None: that of its encoder.

    UnavailableError without transformers; UnsupportedError for what it does not know; InvalidArgumentError for files
    that are damaged and weights that are missing. Code that comes with a checkpoint is not run, pickles are not read.
    """
    entries = text_config(checkpoint)
    model_type = str(entries["model_type"])
    if options.quantization is not None or options.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"quantization and tensor_parallel_size are not supported for {model_type}, which is an encoder"
        )
    try:
        import transformers
    except ImportError:
        raise UnavailableError(
            f"the {model_type} in {checkpoint.place} is an encoder, which runs on transformers' network: pip install "
            "transformers"
        ) from None
    checkpoint.names()  # raises for damaged files and for formats other than safetensors
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, stored_dtype(entries), device)
    # A pooler is for classes: nothing looks at that of an encoder.
    unused = "pooler." if loader is None else ""
    loader = loader or ("AutoModelForTextEncoding" if model_type in ENCODER_DECODERS else "AutoModel")
    auto = getattr(transformers, loader)
    model = load_pretrained(auto, checkpoint, model_type, unused=unused, dtype=dtype, use_safetensors=True)
    config = model.config
    for given in (pad_token_id, config.pad_token_id, config.eos_token_id, 0):
        if isinstance(given, int) and 0 <= given < config.vocab_size:
            pad_token_id = given
            break
    assert pad_token_id is not None, "a vocabulary has a first token"
    named = checkpoint.tokenizer.config.get("model_input_names") or (_TYPES,)
    config.pad_token_id = pad_token_id  # by which some heads find a text's last token
    model = model.eval().to(device)
    ids = torch.full((1, 2), pad_token_id, device=device)
    pack_linears(model, lambda: getattr(model(input_ids=ids, attention_mask=torch.ones_like(ids)), output))
    return EncoderNetwork(
        model,
        device,
        int(config.vocab_size),
        pad_token_id,
        has_types=(getattr(config, "type_vocab_size", 0) or 0) > 1 and _TYPES in named,
        output=output,
    )


def longest_text(checkpoint: Checkpoint, options: EngineOptions) -> int:
    """In tokens, of an encoder. InvalidArgumentError where the options ask for more than there are positions."""
    entries = text_config(checkpoint)
    positions = num_positions(entries)
    return choose_max_model_len(options.max_model_len, usual_len(entries, checkpoint), positions or _LONGEST)


# The limit if neither the network nor the tokenizer has one: longer texts would exceed a step's memory anyway.
_LONGEST = 1 << 20


class Encoder(TextModel):
    """Embeds texts, or each token of them."""

    operations = (Operation.EMBED, Operation.TOKEN_EMBED)
    what = "embeds"

    def __init__(
        self,
        network: EncoderNetwork,
        head: EmbeddingHead,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(tokenizer, max_model_len=max_model_len, vocab_size=network.vocab_size)
        self.head = head
        self.stretch = network.stretch
        self._network = network
        self._thread = ComputeThread(network.device, num_threads)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, options: EngineOptions) -> Encoder:
        """Raises ServerErrors that name the file or the option."""
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        network = load_network(checkpoint, options, pad_token_id=tokenizer.pad_token_id)
        head = load_head(checkpoint, options, default="mean", device=network.device)
        with torch.inference_mode():
            head(*network([[0]]))  # so that parts that do not fit together fail now
        return cls(
            network,
            head,
            tokenizer,
            max_model_len=longest_text(checkpoint, options),
            num_threads=choose_num_threads(checkpoint, network.device, options),
        )

    def prepared(self, text: str | bytes) -> str | bytes:
        return self.head.text(text)

    def answer(self, texts: Sequence[Text]) -> list[InferResponse]:
        found: dict[int, InferResponse] = {}
        for operation in self.operations:
            places = [place for place, text in enumerate(texts) if text.call.operation is operation]
            lists = [texts[place].token_ids for place in places]
            if not places:
                continue
            if operation is Operation.TOKEN_EMBED:
                made = [token_rows("token_embeddings", rows) for rows in self.embed_tokens(lists)]
            else:
                made = [
                    embedded(
                        vector,
                        num_tokens=len(texts[place].token_ids),
                        dimensions=texts[place].call.dimensions,
                        is_normalised=self.head.is_normalised,
                    )
                    for place, vector in zip(places, self.embed(lists), strict=True)
                ]
            found |= zip(places, made, strict=True)
        return [found[place] for place in range(len(texts))]

    def embed(self, token_id_lists: Sequence[Sequence[int]]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """A vector [size] per list, in one batch. Not normalised to unit length."""
        self._thread.settle()
        with torch.inference_mode():
            hidden, lengths = self._network(token_id_lists)
            return list(self.head(hidden, lengths).cpu().numpy())

    def embed_tokens(self, token_id_lists: Sequence[Sequence[int]]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """The hidden states [tokens, size] of each list, of length 1 where the checkpoint's vectors have it."""
        self._thread.settle()
        with torch.inference_mode():
            hidden, lengths = self._network(token_id_lists)
            hidden = hidden.float()
            if self.head.is_normalised:
                hidden = torch.nn.functional.normalize(hidden, dim=-1)
            rows = hidden.cpu().numpy()
        return [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]

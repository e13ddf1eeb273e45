"""Classifiers: a network, a head with a score for each label, and the activation that makes probabilities of scores.

Encoders with a head run on transformers' network, batches padded. Decoders with a head, and language models that score
by the next token, run on this package's own network, which pads nothing.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from modelserver.backend import InferResponse, InvalidArgumentError, UnsupportedError

from ..answer import classified
from ..attention.chunked import make_sdpa
from ..attention.kv_blocks import KvBlocks
from ..call import Call
from ..checkpoint import Checkpoint, text_config
from ..compute_thread import ComputeThread, choose_num_threads
from ..contract import Operation
from ..json_fields import quote
from ..models.families import find_family
from ..models.load import LoadedNetwork
from ..models.load import load_network as load_decoder
from ..options import EngineOptions
from ..step_context import compute_fresh
from ..text.tokenizer import LengthCheck, Tokenizer
from .encoder import EncoderNetwork, load_network, longest_text
from .recognition import LOGIT_SCORE, is_encoder, module_kinds
from .text_model import Text, TextModel

Scores = np.ndarray[Any, np.dtype[np.float32]]
# Of a cache that is never written to: texts are computed as wholes.
_BLOCK_SIZE = 16


def _sigmoid(scores: Scores) -> Scores:
    return np.asarray(1.0 / (1.0 + np.exp(-scores.astype(np.float64))), np.float32)


def _softmax(scores: Scores) -> Scores:
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def _identity(scores: Scores) -> Scores:
    return scores


# By the last part of the class's name in torch.
_ACTIVATIONS: Mapping[str, Callable[[Scores], Scores]] = {
    "Identity": _identity,
    "Sigmoid": _sigmoid,
    "Softmax": _softmax,
}


class HeadNetwork(abc.ABC):
    """A network with a head. `vocab_size` tokens have an embedding, and texts of `max_model_len` tokens positions."""

    device: torch.device
    vocab_size: int
    max_model_len: int
    stretch = 2.0

    @abc.abstractmethod
    def logits(
        self, token_id_lists: Sequence[Sequence[int]], type_id_lists: Sequence[Sequence[int] | None] = ()
    ) -> list[torch.Tensor]:
        """Of each list float32 [labels], or [tokens, labels], on the CPU."""


class EncoderHead(HeadNetwork):
    """An encoder's, for texts or for each token of them."""

    def __init__(self, network: EncoderNetwork, *, max_model_len: int, is_of_tokens: bool) -> None:
        self.device = network.device
        self.vocab_size = network.vocab_size
        self.max_model_len = max_model_len
        self.stretch = network.stretch
        self._network = network
        self._is_of_tokens = is_of_tokens

    def logits(
        self, token_id_lists: Sequence[Sequence[int]], type_id_lists: Sequence[Sequence[int] | None] = ()
    ) -> list[torch.Tensor]:
        found, lengths = self._network(token_id_lists, type_id_lists)
        rows = list(found.float().cpu())
        if not self._is_of_tokens:
            return rows
        return [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]


class DecoderHead(HeadNetwork):
    """A decoder's: `score` makes logits [rows, labels] of hidden states, those of last tokens or of all."""

    def __init__(
        self, loaded: LoadedNetwork, score: Callable[[torch.Tensor], torch.Tensor], *, is_of_tokens: bool
    ) -> None:
        self.device = loaded.device
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self._network = loaded.network
        self._score = score
        self._is_of_tokens = is_of_tokens
        blocks = KvBlocks(loaded.kv_layout, num_blocks=1, block_size=_BLOCK_SIZE, device=loaded.device)
        self._attention = make_sdpa(blocks, loaded.attention)

    def logits(
        self,
        token_id_lists: Sequence[Sequence[int]],
        type_id_lists: Sequence[Sequence[int] | None] = (),  # noqa: ARG002  # decoders know no types
    ) -> list[torch.Tensor]:
        hidden = compute_fresh(self._network, self._attention, token_id_lists, self.device)
        if self._is_of_tokens:
            return [self._score(rows).float().cpu() for rows in hidden]
        return list(self._score(torch.stack([rows[-1] for rows in hidden])).float().cpu())


class Classifier(TextModel):
    """Scores texts, pairs of texts or tokens by labels."""

    operations = (Operation.CLASSIFY,)
    what = "classifies"

    def __init__(
        self,
        network: HeadNetwork,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str],
        activation: Callable[[Scores], Scores],
        num_threads: int | None = None,
    ) -> None:
        super().__init__(tokenizer, max_model_len=network.max_model_len, vocab_size=network.vocab_size)
        self.stretch = network.stretch
        self._network = network
        self._labels = tuple(labels)
        self._activation = activation
        self._thread = ComputeThread(network.device, num_threads)

    def answer(self, texts: Sequence[Text]) -> list[InferResponse]:
        self._thread.settle()
        with torch.inference_mode():
            found = self._network.logits([text.token_ids for text in texts], [text.type_ids for text in texts])
        return [self._response(text, logits.numpy()) for text, logits in zip(texts, found, strict=True)]

    def _response(self, text: Text, logits: Scores) -> InferResponse:
        scores = logits if text.call.is_raw else self._activation(logits)
        return classified(scores, self._labels, num_tokens=len(text.token_ids))

    def tokenized(self, call: Call, longest: int | None, check: LengthCheck) -> Text:
        if call.pair is None:
            return super().tokenized(call, longest, check)
        if call.has_special_tokens is False:
            raise InvalidArgumentError("input 'add_special_tokens': expected true for a pair, which they separate")
        text = call.text
        assert text is not None, "the call was checked"
        first = text if isinstance(text, str) else str(text, "utf-8", "replace")
        if _has_template(self.tokenizer):
            token_ids = self._templated(first, call, longest)
            return Text(call, token_ids)
        ids, types = self.tokenizer.encode_pair(first, call.pair, longest=longest, longest_second=call.pair_truncation)
        return Text(call, ids, types if any(types) else None)

    def _templated(self, query: str, call: Call, longest: int | None) -> list[int]:
        """A pair in the model's template. What is too long is cut from the end of the document."""
        tokenizer, document = self.tokenizer, call.pair or ""
        if call.pair_truncation is not None:
            document = tokenizer.shortened(document, call.pair_truncation)
        token_ids = _rendered(tokenizer, query, document)
        if longest is None or len(token_ids) <= longest:
            return token_ids
        room = longest - len(_rendered(tokenizer, query, ""))
        return _rendered(tokenizer, query, tokenizer.shortened(document, max(0, room)))[:longest]


def _has_template(tokenizer: Tokenizer) -> bool:
    """Whether the usual template has the roles of a pair."""
    template = tokenizer.chat_templates.default
    return all(f'"{role}"' in template or f"'{role}'" in template for role in ("query", "document"))


def _rendered(tokenizer: Tokenizer, query: str, document: str) -> list[int]:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def load_classifier(
    checkpoint: Checkpoint, options: EngineOptions, *, labels: Sequence[str], is_of_tokens: bool
) -> Classifier:
    """Raises ServerErrors that name the file or the option."""
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    entries = text_config(checkpoint)
    network: HeadNetwork
    if is_encoder(entries, checkpoint):
        kind = "Token" if is_of_tokens else "Sequence"
        loader = f"AutoModelFor{kind}Classification"
        encoder = load_network(checkpoint, options, pad_token_id=tokenizer.pad_token_id, loader=loader, output="logits")
        max_model_len = longest_text(checkpoint, options)
        network = EncoderHead(encoder, max_model_len=max_model_len, is_of_tokens=is_of_tokens)
    else:
        network = _load_decoder(checkpoint, options, tokenizer, is_of_tokens=is_of_tokens)
    classifier = Classifier(
        network,
        tokenizer,
        labels=labels,
        activation=_ACTIVATIONS[_activation_name(checkpoint, len(labels), is_of_tokens=is_of_tokens)],
        num_threads=choose_num_threads(checkpoint, network.device, options),
    )
    with torch.inference_mode():
        (logits,) = network.logits([[0]])
    if logits.shape[-1] != len(labels):  # parts that do not fit together fail now
        raise InvalidArgumentError(
            f"{checkpoint.place} has a head of {logits.shape[-1]} scores, and its config.json names {len(labels)}"
        )
    return classifier


def _activation_name(checkpoint: Checkpoint, num_labels: int, *, is_of_tokens: bool) -> str:
    """As the checkpoint says; else sigmoid for one label or several at once, and softmax for one of several."""
    entries = checkpoint.config
    nested = entries.get("sentence_transformers")
    named = (
        checkpoint.entries("config_sentence_transformers.json").get("activation_fn")
        or (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or entries.get("sbert_ce_default_activation_function")
    )
    if named is not None:
        name = str(named).rpartition(".")[2].removesuffix("()")
        if name not in _ACTIVATIONS:
            raise UnsupportedError(
                f"{checkpoint.place}: activation_fn {quote(named)}: expected one of {', '.join(_ACTIVATIONS)}"
            )
        return name
    by_problem = {"regression": "Identity", "multi_label_classification": "Sigmoid"}
    if not is_of_tokens and (name := by_problem.get(str(entries.get("problem_type")), "")):
        return name
    return "Sigmoid" if num_labels == 1 and not is_of_tokens else "Softmax"


def _load_decoder(
    checkpoint: Checkpoint, options: EngineOptions, tokenizer: Tokenizer, *, is_of_tokens: bool
) -> DecoderHead:
    model_type = text_config(checkpoint)["model_type"]
    if find_family(model_type) is None or options.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"{checkpoint.place} is a classifier of the family {model_type}: encoders with a head are served, and "
            "decoders that run on this server's own network, on one device"
        )
    token_ids = _scoring_tokens(checkpoint, options, tokenizer)
    loaded = load_decoder(checkpoint, options)
    if token_ids is not None:
        return DecoderHead(loaded, _token_scores(loaded, token_ids), is_of_tokens=False)
    with checkpoint:
        if "score.weight" not in checkpoint:
            raise InvalidArgumentError(f"{checkpoint.place} has no tensor score.weight, which its config.json says")
        weight = checkpoint.tensor("score.weight").to(loaded.device, torch.float32)
        has_bias = "score.bias" in checkpoint
        bias = checkpoint.tensor("score.bias").to(loaded.device, torch.float32) if has_bias else None
    return DecoderHead(
        loaded, lambda rows: torch.nn.functional.linear(rows.float(), weight, bias), is_of_tokens=is_of_tokens
    )


def _scoring_tokens(checkpoint: Checkpoint, options: EngineOptions, tokenizer: Tokenizer) -> list[int] | None:
    """The tokens by whose logits a language model scores; None where it has a head of its own."""
    if options.classifier_from_token is not None:
        return [_token_id(tokenizer, token) for token in options.classifier_from_token]
    place = module_kinds(checkpoint).get(LOGIT_SCORE)
    if place is None:
        return None
    entries = checkpoint.nested(place).entries("config.json")
    named = [entries.get(name) for name in ("false_token_id", "true_token_id")]
    found = [token_id for token_id in named if isinstance(token_id, int)]
    if not isinstance(named[1], int) or not all(0 <= token_id < tokenizer.vocab_size for token_id in found):
        raise InvalidArgumentError(f"{checkpoint.place}/{place}/config.json: true_token_id must be a token's id")
    return found


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is not None:
        return token_id
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidArgumentError(f"classifier_from_token: {quote(token)} is {len(ids)} tokens of this model, not one")
    return ids[0]


def _token_scores(loaded: LoadedNetwork, token_ids: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """One label for the logit of a token, or for that of the second token less that of the first; else one of each."""

    def score(rows: torch.Tensor) -> torch.Tensor:
        logits = loaded.network.logits(rows)[:, list(token_ids)]
        return logits[:, 1:] - logits[:, :1] if len(token_ids) == 2 else logits

    return score

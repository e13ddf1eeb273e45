"""Tiny random networks with a head for classes, encoders and decoders, and what transformers says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from support import tiny_checkpoints, tiny_encoders

from modelserver.backend import Array

LABELS = ("joy", "anger", "fear")
# A template with the roles of a pair, as rerankers have that are language models.
PAIR_TEMPLATE = (
    '{{ bos_token }}<|im_start|>{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
    '<|im_end|>{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_start|>'
)


def write_classifier(
    directory: Path,
    family: str = "bert",
    labels: Sequence[str] = LABELS,
    *,
    kind: str = "Sequence",
    files: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A checkpoint with a head: `kind` is Sequence or Token. `files` are further ones of JSON."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    is_encoder = family in tiny_encoders.ENCODER_FAMILIES
    tiny = tiny_encoders if is_encoder else tiny_checkpoints
    described = (tiny_encoders.ENCODER_FAMILIES if is_encoder else tiny_checkpoints.FAMILIES)[family]
    entries = {**tiny.BASE, **described.values, "id2label": dict(enumerate(labels)), **(values or {})}
    entries |= {"label2id": {name: index for index, name in enumerate(labels)}}
    config = transformers.AutoConfig.for_model(described.model_type, **entries)
    torch.manual_seed(seed)
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(parameter.clone().normal_(0.0, 0.2))
    model.save_pretrained(directory)
    write_tokenizer = tiny_encoders.write_word_tokenizer if is_encoder else tiny_checkpoints.write_tokenizer
    write_tokenizer(directory)
    for name, content in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


@lru_cache(maxsize=8)
def _reference(directory: Path, kind: str) -> tuple[Any, Any]:
    import torch
    import transformers

    loader = getattr(transformers, f"AutoModelFor{kind}")
    model = loader.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def reference_logits(
    directory: Path, text: str, pair: str | None = None, *, kind: str = "SequenceClassification", **tokenizing: Any
) -> Array:
    """transformers' own logits of one text or pair, alone and without padding: [labels] or [tokens, labels]."""
    import torch

    model, tokenizer = _reference(directory, kind)
    inputs = tokenizer(text, pair, return_tensors="pt", **tokenizing)
    if not getattr(model.config, "type_vocab_size", 0) or model.config.type_vocab_size < 2:
        inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        return np.asarray(model(**inputs).logits[0])


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits)))

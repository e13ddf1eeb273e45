"""Tiny random encoders of every family, in directories as sentence-transformers publishes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny_checkpoints import Family

from modelserver.backend import Array

VOCAB_SIZE = 300
PAD_TOKEN_ID = 1
SIZE = 32
_SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")
_WORDS = "the model of a server answers every request that it is given and then it waits for the next one to come"
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
_T5: dict[str, Any] = {"d_model": SIZE, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 7,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention"],
}

ENCODER_FAMILIES: dict[str, Family] = {
    "albert": Family("albert", {"embedding_size": 16}),
    "bert": Family("bert"),
    "camembert": Family("camembert"),
    "data2vec": Family("data2vec-text"),
    "deberta": Family("deberta", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta_v2": Family(
        "deberta-v2",
        {
            "relative_attention": True,
            "position_biased_input": False,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
        },
    ),
    "distilbert": Family("distilbert", {"dim": SIZE, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "electra": Family("electra", {"embedding_size": 16}),
    "ernie": Family("ernie"),
    "eurobert": Family("eurobert", {"num_key_value_heads": 2}),
    "gemma3": Family("gemma3_text", _GEMMA),
    "gte": Family("gte"),
    "jina": Family("jina_embeddings_v3"),
    "llama": Family("llama", {"is_causal": False, "num_key_value_heads": 2}),
    "megatron_bert": Family("megatron-bert"),
    "modernbert": Family("modernbert", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "mpnet": Family("mpnet"),
    "nomic": Family("nomic_bert"),
    "rembert": Family("rembert", {"input_embedding_size": 16}),
    "roberta": Family("roberta"),
    "roberta_prelayernorm": Family("roberta-prelayernorm"),
    "roformer": Family("roformer"),
    "t5": Family("t5", _T5),
    "xlm_roberta": Family("xlm-roberta"),
    "xlm_roberta_xl": Family("xlm-roberta-xl"),
    "xmod": Family("xmod", {"languages": ["en_XX"], "default_language": "en_XX"}),
}


def write_encoder(
    directory: Path,
    family: str = "bert",
    *,
    modules: Sequence[str] = ("Pooling", "Normalize"),
    pooling: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A checkpoint with modules.json; `pooling` is its config (means, if None), `files` are further ones of JSON."""
    _write_network(directory, family, values or {}, seed)
    write_word_tokenizer(directory)
    kinds = ("Transformer", *modules)
    listed = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    described = {"modules.json": listed, **(files or {})}
    for at, kind in enumerate(kinds):
        if kind == "Pooling":
            described[f"{at}_{kind}/config.json"] = pooling or {"pooling_mode_mean_tokens": True}
        elif kind == "Dense":
            _write_dense(directory / f"{at}_{kind}", seed)
    for name, content in described.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


def _write_network(directory: Path, family: str, values: Mapping[str, Any], seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding
    from transformers.utils import logging

    logging.disable_progress_bar()
    described = ENCODER_FAMILIES[family]
    config = AutoConfig.for_model(described.model_type, **{**BASE, **described.values, **values})
    torch.manual_seed(seed)
    loader: Any = AutoModelForTextEncoding if family == "t5" else AutoModel
    model = loader.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(parameter.clone().normal_(0.0, 0.2))
    model.save_pretrained(directory)


def _write_dense(directory: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    drawn = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(24, SIZE, generator=drawn), "linear.bias": torch.randn(24, generator=drawn)}
    save_file(tensors, directory / "model.safetensors")
    described = {"in_features": SIZE, "out_features": 24, "bias": True}
    (directory / "config.json").write_text(
        json.dumps({**described, "activation_function": "torch.nn.modules.activation.Tanh"})
    )


def write_word_tokenizer(directory: Path) -> None:
    """Word pieces between [CLS] and [SEP], as BERT has them; every letter is one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    pieces = [*_SPECIAL, *dict.fromkeys([*_WORDS.split(), *letters, *(f"##{letter}" for letter in letters)])]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": "[CLS]",
        "pad_token": "[PAD]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "model_max_length": 48,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described))


@lru_cache(maxsize=4)
def _reference_model(directory: Path) -> Any:
    import torch
    from transformers import AutoModel, AutoModelForTextEncoding

    family = json.loads((directory / "config.json").read_text())["model_type"]
    loader: Any = AutoModelForTextEncoding if family == "t5" else AutoModel
    return loader.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def reference_hidden(directory: Path, token_ids: Sequence[int]) -> Array:
    """transformers' own hidden states [tokens, size] of one text, alone and without padding."""
    import torch

    ids = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        output = _reference_model(directory)(input_ids=ids, attention_mask=torch.ones_like(ids))
    return np.asarray(output.last_hidden_state[0])


def unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector)

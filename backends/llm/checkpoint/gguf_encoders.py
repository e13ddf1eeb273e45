"""The architectures of GGUF files that are encoders, as networks of transformers, and what follows the network.

Files of RoBERTa's kind have the positions without those that padding takes, which makes them BERT's.
"""

from __future__ import annotations

from typing import Any

from modelserver.backend import InvalidArgumentError

from .gguf_architecture import TOP, Architecture, Entries, Metadata, common_entries
from .gguf_tokenizer import NAMED_TOKENS, PREFIX

# Dense layers that follow pooling: modules of their own, by their directories in a checkpoint of sentence-transformers.
DENSE = {"dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4
_MODULES = "sentence_transformers.models."


def _layer_norm_entries(metadata: Metadata) -> Entries:
    """What the families that descend from BERT share."""
    size = metadata.integer("embedding_length")
    entries = {
        "vocab_size": _rows(metadata, "token_embd"),
        "hidden_size": size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata.integer("attention.head_count"),
        "max_position_embeddings": metadata.optional_integer("context_length") or 512,
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon") or 1e-12,
        "dtype": metadata.dtype(),
        **_token_ids(metadata),
    }
    if "token_types.weight" in metadata.tensors:
        entries["type_vocab_size"] = _rows(metadata, "token_types")
    return entries


def _token_ids(metadata: Metadata) -> Entries:
    """Padding has one in any case: the usual one of a family may lie outside of the vocabulary."""
    found = {f"{name}_id": metadata.file.integer(PREFIX + key) for name, key in NAMED_TOKENS.items()}
    return {"pad_token_id": 0} | {name: token_id for name, token_id in found.items() if token_id is not None}


def _rows(metadata: Metadata, module: str) -> int:
    shape = metadata.matrix(f"{module}.weight").shape
    if len(shape) != 2:
        raise InvalidArgumentError(f"{metadata.file.path}: tensor {module}.weight is not a matrix")
    return shape[0]


def _bert(metadata: Metadata) -> Entries:
    return {
        **_layer_norm_entries(metadata),
        "max_position_embeddings": _rows(metadata, "position_embd"),
        "hidden_act": "gelu",
    }


def _distilbert(metadata: Metadata) -> Entries:
    entries = _bert(metadata)
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim"}
    names |= {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_act": "activation"}
    return {names.get(name, name): value for name, value in entries.items()}


def _rotated(metadata: Metadata, theta: float) -> Entries:
    rope = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base") or theta}
    return {**_layer_norm_entries(metadata), "rope_parameters": rope}


def _nomic_bert(metadata: Metadata) -> Entries:
    return {**_rotated(metadata, 1000.0), "hidden_act": "silu"}


def _jina_bert_v3(metadata: Metadata) -> Entries:
    return {**_rotated(metadata, 20000.0), "hidden_act": "gelu"}


def _modernbert(metadata: Metadata) -> Entries:
    entries = _layer_norm_entries(metadata)
    period = metadata.optional_integer("attention.sliding_window_pattern") or 3
    layers = range(metadata.num_layers)
    return {
        **entries,
        "norm_eps": entries.pop("layer_norm_eps"),
        "hidden_activation": metadata.text("hidden_activation") or "gelu",
        "local_attention": metadata.optional_integer("attention.sliding_window") or 128,
        "layer_types": ["sliding_attention" if index % period else "full_attention" for index in layers],
        "rope_parameters": {
            "full_attention": _plain_rope(metadata.number("rope.freq_base") or 160000.0),
            "sliding_attention": _plain_rope(metadata.number("rope.freq_base_swa") or 10000.0),
        },
    }


def _eurobert(metadata: Metadata) -> Entries:
    return {**common_entries(metadata), **_token_ids(metadata)}


def _plain_rope(theta: float) -> Entries:
    return {"rope_type": "default", "rope_theta": theta}


def bert_architecture(metadata: Metadata) -> Architecture:
    """BERT's, or DistilBERT's, which knows no kinds of tokens."""
    return _BERT if "token_types.weight" in metadata.tensors else _DISTILBERT


def sentence_documents(metadata: Metadata) -> dict[str, Any]:
    """The documents of sentence-transformers that say what follows the network; none where the file does not say."""
    pooling = _POOLINGS.get(metadata.optional_integer("pooling_type") or 0)
    if pooling is None:
        return {}
    dense = [module.partition(".")[0] for name, module in DENSE.items() if f"{name}.weight" in metadata.tensors]
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *(("Dense", place) for place in dense), ("Normalize", "")]
    documents: dict[str, Any] = {
        "modules.json": [{"type": f"{_MODULES}{kind}", "path": place} for kind, place in modules],
        "1_Pooling/config.json": {"pooling_mode": pooling},
    }
    for place in dense:
        documents[f"{place}/config.json"] = {
            "activation_function": "torch.nn.Identity",
            "bias": f"dense_{place[0]}.bias" in metadata.tensors,
        }
    return documents


def purpose(metadata: Metadata, entries: Entries) -> Entries:
    """Further entries of a config that say what a network is for, where it is not what its family is for."""
    found: Entries = {}
    is_causal = metadata.file.flag(f"{metadata.name}.attention.causal")
    if is_causal is False and "use_bidirectional_attention" not in entries:
        found["is_causal"] = False
    if metadata.optional_integer("pooling_type") == _RANK:
        found["architectures"] = ["ForSequenceClassification"]
    return found


_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_BERT_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_ROTATED_LAYER = {
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
_SEPARATE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BERT = Architecture(
    model_type="bert",
    entries=_bert,
    top=_EMBEDDINGS,
    layer=_BERT_LAYER,
    layer_name="encoder.layer.{}",
    fused={"attn_qkv": tuple(_BERT_LAYER[name] for name in ("attn_q", "attn_k", "attn_v"))},
)
_DISTILBERT = Architecture(
    model_type="distilbert",
    entries=_distilbert,
    top=_EMBEDDINGS,
    layer={
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    },
    layer_name="transformer.layer.{}",
)

ENCODERS: dict[str, Architecture] = {
    "bert": _BERT,
    "nomic-bert": Architecture(
        model_type="nomic_bert",
        entries=_nomic_bert,
        top=_EMBEDDINGS,
        layer=_ROTATED_LAYER | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        fused={"attn_qkv": _SEPARATE},
    ),
    "jina-bert-v3": Architecture(
        model_type="jina_embeddings_v3",
        entries=_jina_bert_v3,
        top=_EMBEDDINGS,
        layer=_ROTATED_LAYER | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        fused={"attn_qkv": _SEPARATE},
    ),
    "modern-bert": Architecture(
        model_type="modernbert",
        entries=_modernbert,
        top={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
        },
        layer={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
    ),
    "eurobert": Architecture(model_type="eurobert", entries=_eurobert, top=TOP),
}

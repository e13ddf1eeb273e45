"""The names of a decoder's parts in families of checkpoints, without the prefixes that a `Checkpoint` removes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Modules of a decoder; the usual ones are Llama's.

    `layer` has a place for the layer's number; the fields after it are inside a layer. `qkv` and `gate_up` are used
    where the checkpoint has them, else their parts. `is_transposed`: linear weights are stored as [in, out].
    """

    embedding: str = "embed_tokens"
    positions: str | None = None
    norm: str = "norm"
    head: str = "lm_head"
    layer: str = "layers.{}"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str = "self_attn.qkv_proj"
    attention_output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_pre_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_pre_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_expert_gate: str = "mlp.shared_expert_gate"
    is_transposed: bool = False

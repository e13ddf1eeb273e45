"""The config of a decoder, and the names of its parts in families of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend import InvalidArgumentError

from .rope import Rope

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)

# Of linear biases by position: a position is kept as two values of less than 256, the integers that bfloat16 has all.
SLOPE_BASE = 256
_MOST_SLOPED_POSITIONS = SLOPE_BASE**2
_SLOPE_WIDTH, _KEPT_MULTIPLE = 4, 8

_LATENT_NAMES = {
    "rank": "kv_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts of the sparse layers. `shared_intermediate_size` 0: there is no shared expert.

    The router's `scores` are the softmax over all experts, or the sigmoid of each. With `num_groups`, experts of the
    best `num_chosen_groups` groups alone are chosen, by the sum of the `group_votes` best scores of each.
    `weight_scale` multiplies the weights of the chosen experts, after they were normalised; the shared expert has none.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    is_normalised: bool
    shared_intermediate_size: int = 0
    is_shared_gated: bool = True
    scores: str = "softmax"  # "softmax" | "sigmoid"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_votes: int = 1
    weight_scale: float = 1.0

    def mistakes(self) -> Iterator[str]:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            yield f"num_experts_per_tok {self.num_experts_per_tok}: expected 1 to num_experts ({self.num_experts})"
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            yield f"n_group {self.num_groups}: expected a divisor of num_experts ({self.num_experts})"
            return
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            yield f"topk_group {self.num_chosen_groups}: expected 1 to n_group ({self.num_groups})"
        group = self.num_experts // self.num_groups
        if self.num_groups > 1 and self.group_votes > group:
            yield f"n_group {self.num_groups}: expected groups of {self.group_votes} experts at least"
        if self.num_experts_per_tok > group * self.num_chosen_groups:
            yield f"num_experts_per_tok {self.num_experts_per_tok}: expected at most the experts of topk_group groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention. `query_rank` None: queries are made by one matrix.

    A head's query and key have `plain_dim` values and behind them `rope_dim` that are rotated.
    """

    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    is_interleaved: bool = True

    def mistakes(self) -> Iterator[str]:
        for name in ("rank", "plain_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                yield f"{_LATENT_NAMES[name]} {getattr(self, name)}: expected 1 or more"
        if self.query_rank is not None and self.query_rank < 1:
            yield f"q_lora_rank {self.query_rank}: expected 1 or more, or null"
        if self.rope_dim % 2:
            yield f"qk_rope_head_dim {self.rope_dim}: expected an even number"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The switches of `Decoder`. Tuples have an entry per layer; a window of None sees everything.

    `slopes` (ALiBi): for each query head, what a score gains per position of its key. None without such biases.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    ropes: tuple[Rope | None, ...]
    norm_kind: str = "rms"  # | "rms_plus_one" (the weight is stored less one) | "layer" | "layer_unbiased"
    norm_eps: float = 1e-6
    has_pre_norm: bool = True
    has_post_norm: bool = False
    qk_norm: str | None = None  # None | "head" | "all" (over all heads together)
    activation: str = "silu"
    is_gated: bool = True
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    is_tied: bool = False
    latent: LatentConfig | None = None
    moe: MoeConfig | None = None
    moe_layers: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    dtype: str = "float32"

    @property
    def kept_head_dim(self) -> int:
        """The width of a head's keys and values in the KV cache."""
        if self.slopes is None:
            return self.head_dim
        return -(-(self.head_dim + _SLOPE_WIDTH) // _KEPT_MULTIPLE) * _KEPT_MULTIPLE

    @property
    def longest(self) -> int:
        """How many positions the network can tell apart, be it by the scaling of its rotations or by slopes."""
        if self.slopes is not None:
            return _MOST_SLOPED_POSITIONS
        stretched = [rope.longest for rope in self.ropes if rope is not None]
        return max([self.max_position_embeddings, *stretched])

    @property
    def distinct_ropes(self) -> tuple[Rope, ...]:
        """Each kind of rotation once; most families turn all layers alike."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    def check(self, path: Path) -> None:
        """Raise InvalidArgumentError, naming the file, for numbers that no network has."""
        mistake = next(self._mistakes(), None)
        if mistake is not None:
            raise InvalidArgumentError(f"{path} of a {self.model_type} says {mistake}")

    def _mistakes(self) -> Iterator[str]:
        for name in _SIZES:
            if getattr(self, name) < 1:
                yield f"{name} {getattr(self, name)}: expected 1 or more"
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads {self.num_kv_heads}: expected a divisor of num_heads ({self.num_heads})"
        for name in ("windows", "ropes"):
            if len(getattr(self, name)) != self.num_layers:
                yield f"{name} of {len(getattr(self, name))} layers: expected {self.num_layers}, as num_layers"
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                yield f"sliding_window {window!r}: expected an integer, 1 or more"
        for name in ("attention_softcap", "logit_softcap"):
            softcap = getattr(self, name)
            if softcap is not None and not (isinstance(softcap, int | float) and softcap > 0):
                yield f"{name} {softcap!r}: expected a number greater than 0"
        if self.slopes is not None and self.max_position_embeddings > _MOST_SLOPED_POSITIONS:
            yield f"{self.max_position_embeddings} positions with ALiBi: expected at most {_MOST_SLOPED_POSITIONS}"
        if isinstance(self.attention_scale, complex):
            yield "query_pre_attn_scalar less than 0: expected more"
        yield from self.moe.mistakes() if self.moe is not None else ()
        yield from self.latent.mistakes() if self.latent is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Modules of a decoder; the usual ones are Llama's.

    `layer` has a place for the layer's number; the fields after it are inside a layer. `qkv` and `gate_up` are used
    where the checkpoint has them, else their parts. So is `latent_up`, of which GGUF has keys and values apart, the
    keys' transposed. `router_correction` is a tensor that is added to scores when experts are chosen, if the checkpoint
    has it. `is_transposed`: linear weights are stored as [in, out].
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
    query_down: str = "self_attn.q_a_proj"
    query_up: str = "self_attn.q_b_proj"
    latent_query_norm: str = "self_attn.q_a_layernorm"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    latent_key: str = "self_attn.k_b_proj"
    latent_value: str = "self_attn.v_b_proj"
    attention_pre_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_pre_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_correction: str | None = None
    experts: str = "mlp.experts"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_expert_gate: str = "mlp.shared_expert_gate"
    is_transposed: bool = False

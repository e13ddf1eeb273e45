"""EAGLE heads: trained for a finished network, in directories of their own.

EAGLE (https://arxiv.org/abs/2401.15077) reads the network's last states; EAGLE-3 (https://arxiv.org/abs/2503.01840)
those that three of its layers had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..attention.kv_blocks import KvGroup, KvLayout
from ..models.build import DecoderBuilder
from ..models.decoder import Block, Decoder
from ..models.decoder_config import DecoderConfig, Names
from ..models.draft_head import DraftHead, JoinedLayer
from ..models.families.readers import base_config
from ..models.linear import Linear
from ..models.linear_tensors import Part
from ..models.norm import Norm, identity
from ..models.weights import Weights
from ..quantization import find_scheme
from ..step_context import StepContext
from .config import SpeculativeConfig

if TYPE_CHECKING:
    from ..runner import Runner

# Switches of checkpoints that change what is computed, and that no published head of these forms needs.
_REFUSED = ("norm_before_fc", "fc_norm", "attention_bias", "mlp_bias", "add_para_norm")
_Rows = Callable[[torch.Tensor], torch.Tensor]
# EAGLE-3's layer, which some call the first one of a network.
_MIDLAYER = "midlayer"


class Eagle3Layer:
    """Attention over the normalised embedding and states side by side, and a feed-forward, around the states."""

    def __init__(
        self,
        attention: Block,
        mlp: Block,
        *,
        embedding_norm: Norm,
        hidden_norm: Norm,
        mlp_norm: Norm,
        norms_residual: bool,
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._embedding_norm = embedding_norm
        self._hidden_norm = hidden_norm
        self._mlp_norm = mlp_norm
        self._norms_residual = norms_residual

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor:
        normed = self._hidden_norm(states)
        rows = torch.cat((self._embedding_norm(embedded), normed), dim=-1)
        hidden = self._attention.add_to(normed if self._norms_residual else states, rows, step)
        return self._mlp.add_to(hidden, self._mlp_norm(hidden), step)


def load_eagle(config: SpeculativeConfig, runner: Runner) -> DraftHead:
    """The head in `config.model` for the network of a runner. Raises ServerErrors that name the file or the option."""
    from ..checkpoint import open_checkpoint

    assert config.model is not None, "the config was checked"
    place = Path(config.model).expanduser()
    what = f"speculative_config.model {place}"
    if not place.is_dir():
        raise InvalidArgumentError(f"speculative_config.model: there is no directory {place}")
    network = runner.network
    if not isinstance(network, Decoder) or network.config.latent is not None:
        raise UnsupportedError(
            f"{what}: this model's network does not hand out the states of its layers: remove speculative_config"
        )
    make = _eagle3_head if config.method == "eagle3" else _eagle_head
    with open_checkpoint(place) as checkpoint, torch.inference_mode():
        entries = checkpoint.config.get("transformer_layer_config") or checkpoint.config
        _refuse_switches(what, checkpoint.config, entries)
        try:
            found = base_config({**entries, "num_hidden_layers": 1})
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidArgumentError(
                f"{what}: config.json has an entry that is missing or wrong: {error!r}"
            ) from error
        found.check(place / "config.json")
        weights = Weights(
            checkpoint,
            find_scheme(None, checkpoint.config),
            dtype=runner.blocks.layout.group.heads_dtype,
            device=runner.blocks.device,
        )
        try:
            return make(what, found, weights, network, runner)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"{what} does not fit this model, or was made for another model: {error}"
            ) from None


def _eagle_head(what: str, config: DecoderConfig, weights: Weights, network: Decoder, runner: Runner) -> DraftHead:
    """A layer without a norm before its attention; its states go into the network's head as they are."""
    if weights.has_module("layers.1.self_attn.q_proj"):
        raise UnsupportedError(f"{what}: it has more than one layer, which is not supported")
    build = DecoderBuilder(config, Names(attention_pre_norm=""), weights)
    layer = build.layer(
        0,
        attention=build.attention(0),
        mlp=build.feed_forward(0),
        norm_of=lambda made, name: identity if name.endswith(".") else made.norm(name),
    )
    join = weights.whole([Part("fc", 2 * network.config.hidden_size, (config.hidden_size,))])
    return DraftHead(
        JoinedLayer(layer, join),
        _kept(config, weights.dtype),
        scale=config.attention_scale,
        rope=config.distinct_ropes[0],
        layers=(network.config.num_layers,),
        read=network.normalised,
        embed=network.embed,
        norm=identity,
        logits=network.logits,
        max_len=runner.max_model_len,
        device=weights.device,
    )


def _eagle3_head(what: str, config: DecoderConfig, weights: Weights, network: Decoder, runner: Runner) -> DraftHead:
    entries = weights.checkpoint.config
    eagle = entries.get("eagle_config") or {}
    layers = _read_layers(what, entries, eagle, network.config.num_layers)
    hidden = config.hidden_size
    name = _MIDLAYER if weights.has_module(f"{_MIDLAYER}.self_attn.q_proj") else "layers.0"
    build = DecoderBuilder(config, Names(layer=name), weights)
    layer = Eagle3Layer(
        build.attention(0, num_inputs=2 * hidden),
        build.mlp(build.prefix(0)),
        embedding_norm=build.norm(f"{name}.input_layernorm"),
        hidden_norm=build.norm(f"{name}.hidden_norm"),
        mlp_norm=build.norm(f"{name}.post_attention_layernorm"),
        norms_residual=bool(entries.get("norm_before_residual", False)),
    )
    join = weights.whole([Part("fc", len(layers) * network.config.hidden_size, (hidden,))])
    embed: _Rows = network.embed
    logits: _Rows = network.logits
    targets = None
    if weights.has_module("embed_tokens"):
        embed = weights.embedding(Part("embed_tokens", hidden, (config.vocab_size,)))
    if weights.has_module("lm_head"):
        num_tokens = weights.checkpoint.shape("lm_head.weight")[0]
        targets = _targets(what, weights, num_tokens, runner.vocab_size)
        head = weights.head(Part("lm_head", hidden, (num_tokens,)))
        logits = partial(_head_logits, head)

    return DraftHead(
        layer,
        _kept(config, weights.dtype),
        scale=config.attention_scale,
        rope=config.distinct_ropes[0],
        layers=layers,
        read=lambda states: join(states, None),
        embed=embed,
        norm=build.norm("norm"),
        logits=logits,
        feeds_normalised=bool(entries.get("norm_output", eagle.get("norm_output", False))),
        targets=targets,
        max_len=runner.max_model_len,
        device=weights.device,
    )


def _head_logits(head: Linear, rows: torch.Tensor) -> torch.Tensor:
    return head(rows, None)


def _kept(config: DecoderConfig, dtype: torch.dtype) -> KvGroup:
    return KvLayout.uniform(num_layers=1, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype).group


def _refuse_switches(what: str, config: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    for switch in _REFUSED:
        if any(each.get(switch) for each in (config, entries, config.get("eagle_config") or {})):
            raise UnsupportedError(f"{what}: config.json has {switch}, which is not supported")


def _read_layers(what: str, entries: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int) -> Sequence[int]:
    """The states before these layers of the network are read."""
    name = "eagle_aux_hidden_state_layer_ids"
    layers = sorted(eagle.get(name) or entries.get(name) or (2, num_layers // 2, num_layers - 3))
    if len(layers) != 3 or len(set(layers)) != 3 or not all(0 <= layer <= num_layers for layer in layers):
        raise UnsupportedError(f"{what}: it reads the states of layers {layers}; this model has {num_layers} layers")
    return layers


def _targets(what: str, weights: Weights, num_tokens: int, vocab_size: int) -> torch.Tensor | None:
    """Of a head that knows a part of the vocabulary."""
    if "d2t" not in weights.checkpoint:
        if num_tokens > vocab_size:
            raise InvalidArgumentError(f"{what}: lm_head has {num_tokens} tokens, and this model {vocab_size}")
        return None
    targets = weights.checkpoint.tensor("d2t").to(weights.device)
    ids = targets + torch.arange(len(targets), device=targets.device)
    if len(targets) != num_tokens or not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise InvalidArgumentError(f"{what}: d2t names tokens that this model, or lm_head, does not have")
    return targets

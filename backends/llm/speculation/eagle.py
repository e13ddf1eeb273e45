"""EAGLE-3 (https://arxiv.org/abs/2503.01840): a trained layer guesses from what the network's layers made of a text.

Row t of it reads the token t + 1 and the states that three layers of the network had of token t, and gives the token
t + 2. Behind the text it reads its own guesses, with its own states in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.decoder import Decoder
from ..models.rope import read_rope
from ..sequence import Sequence as Generated
from .config import SpeculativeConfig

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..runner import Runner

# A sequence keeps the states of this many tokens, the last ones of a longer prompt, until it gets drafts.
_MOST_PENDING = 1024
# Switches of checkpoints that change what is computed, and that no published head of this form needs.
_REFUSED = ("norm_before_fc", "fc_norm", "attention_bias", "mlp_bias")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What config.json says of a head. `layers`: the states before these layers of the network are its input."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    norms_residual: bool
    norms_output: bool


class _Text:
    """Of one sequence: keys and values of rows [first, end), and states of the tokens behind them that wait."""

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.pending: list[torch.Tensor] = []
        self.num_pending = 0

    def take(self, start: int, states: torch.Tensor) -> None:
        """States of tokens from `start` on: those that were there from it on are forgotten."""
        behind = self.end + self.num_pending
        if not self.first <= start <= behind:
            self.__init__(start)  # type: ignore[misc]  # there is a gap: nothing before it is seen
        elif start < self.end:
            self.end, self.pending, self.num_pending = start, [], 0
        elif start < behind:
            self.pending = [torch.cat(self.pending)[: start - self.end]]
            self.num_pending = start - self.end
        self.pending.append(states)
        self.num_pending += len(states)
        if self.num_pending > _MOST_PENDING:
            start = self.end + self.num_pending - _MOST_PENDING
            kept = torch.cat(self.pending)[-_MOST_PENDING:]
            self.__init__(start)  # type: ignore[misc]
            self.pending, self.num_pending = [kept], len(kept)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, with those of further rows [rows, heads, width]."""
        num_old = self.end - self.first
        self.end += len(keys)
        size = self.end - self.first
        if self.keys is None or self.values is None or len(self.keys) < size:
            room = max(64, 2 * size)
            grown = [new.new_empty(room, *new.shape[1:]) for new in (keys, values)]
            for each, old in zip(grown, (self.keys, self.values), strict=True):
                if old is not None:
                    each[:num_old] = old[:num_old]
            self.keys, self.values = grown
        self.keys[num_old:size] = keys
        self.values[num_old:size] = values
        return self.keys[:size], self.values[:size]


class EagleHead:
    """A proposer. It gets the network's states by `take`, after each step, and drafts greedily."""

    def __init__(
        self,
        network: Decoder,
        config: HeadConfig,
        weights: Mapping[str, torch.Tensor],
        tables: Sequence[torch.Tensor],
        *,
        most_sequences: int,
    ) -> None:
        """`most_sequences`: with more of them in a step nothing is drafted, and no states are kept."""
        self._network = network
        self._config = config
        self._weights = weights
        self._cosines, self._sines = tables
        self._targets = weights.get("d2t")
        self._most_sequences = most_sequences
        self._texts: dict[int, _Text] = {}

    def take(
        self, sequences: Sequence[Generated], starts: Sequence[int], counts: Sequence[int], states: torch.Tensor
    ) -> None:
        """The states [rows, layers x width] of a step: of each sequence those of tokens from its start on."""
        if len(sequences) > self._most_sequences:
            self._texts.clear()
            return
        for sequence, start, part in zip(sequences, starts, states.split(list(counts)), strict=True):
            text = self._texts.setdefault(sequence.seq_id, _Text(start))
            text.take(start, part)

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        with torch.inference_mode():
            for sequence, num_drafts in wanted:
                text = self._texts.get(sequence.seq_id)
                if text is not None:
                    sequence.drafts = self._drafts(text, sequence.token_ids, num_drafts)

    def _drafts(self, text: _Text, token_ids: list[int], num_drafts: int) -> list[int]:
        # The last token has no states yet; what was computed of drafts that were wrong is left out.
        num_rows = min(text.num_pending, len(token_ids) - 1 - text.end)
        if num_rows < 1:
            return []
        states = torch.cat(text.pending)[:num_rows]
        text.pending, text.num_pending = [], 0
        following = token_ids[text.end + 1 : text.end + 1 + num_rows]
        hidden = self._layer(text, following, F.linear(states, self._weights["fc"]))[-1:]
        end, drafts = text.end, []
        while True:
            drafts.append(self._token(hidden))
            if len(drafts) == num_drafts or text.end >= len(self._cosines):
                break
            fed = self._norm(hidden, "norm") if self._config.norms_output else hidden
            hidden = self._layer(text, drafts[-1:], fed)
        text.end = end
        return drafts

    def _layer(self, text: _Text, token_ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """Rows behind those of a text: [rows, hidden_size], not normalised."""
        config, weights = self._config, self._weights
        ids = torch.tensor(token_ids, device=states.device)
        embedded = F.embedding(ids, weights["embed"]) if "embed" in weights else self._network.embed(ids)
        normed = self._norm(states, "hidden_norm")
        rows = torch.cat((self._norm(embedded, "input_layernorm"), normed), dim=-1)
        first, num_rows = text.end, len(token_ids)
        heads = [F.linear(rows, weights[name]).view(num_rows, -1, config.head_dim) for name in ("q", "k", "v")]
        cosines, sines = (table[first : first + num_rows, None] for table in (self._cosines, self._sines))
        queries, keys = (_turned(each, cosines, sines) for each in heads[:2])
        known_keys, known_values = text.extend(keys, heads[2])
        mask = None
        if num_rows > 1:
            ones = torch.ones(num_rows, len(known_keys), dtype=torch.bool, device=states.device)
            mask = ones.tril(len(known_keys) - num_rows)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            known_keys.transpose(0, 1)[None],
            known_values.transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        residual = normed if config.norms_residual else states
        hidden = residual + F.linear(mixed[0].transpose(0, 1).flatten(1), weights["o"])
        inner = self._norm(hidden, "post_attention_layernorm")
        gated = F.silu(F.linear(inner, weights["gate"])) * F.linear(inner, weights["up"])
        return hidden + F.linear(gated, weights["down"])

    def _token(self, hidden: torch.Tensor) -> int:
        normed = self._norm(hidden, "norm")
        head = self._weights.get("head")
        logits = self._network.logits(normed) if head is None else F.linear(normed, head)
        best = int(logits.argmax())
        return best if self._targets is None else best + int(self._targets[best])

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        wide = rows.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.eps)
        return scaled.to(rows.dtype) * self._weights[name]

    def end(self, sequence: Generated) -> None:
        self._texts.pop(sequence.seq_id, None)

    def close(self) -> None:
        self._texts.clear()


def _turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def load_eagle(config: SpeculativeConfig, runner: Runner) -> EagleHead:
    """The head in `config.model`, which gets the states of all steps of the runner from now on.

    Raises ServerErrors that name the file or the option.
    """
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
    if runner.has_followers:
        raise UnsupportedError("speculative_config.method eagle3 is not supported with tensor_parallel_size")
    device, dtype = runner.blocks.device, runner.blocks.layout.group.heads_dtype
    with open_checkpoint(place) as checkpoint:
        entries = checkpoint.config.get("transformer_layer_config") or checkpoint.config
        head = _head_config(what, checkpoint.config, entries, network.config.num_layers)
        weights = _weights(checkpoint, device, dtype)
    _check_shapes(what, head, weights, network.config.hidden_size, runner.vocab_size)
    rope = read_rope(
        entries.get("rope_parameters") or entries.get("rope_scaling") or {}, head_dim=head.head_dim, config=entries
    )
    tables = [table.to(device, dtype) for table in rope.tables(runner.max_model_len)]
    most_sequences = config.most_sequences(is_gpu=runner.is_asynchronous)
    proposer = EagleHead(network, head, weights, tables, most_sequences=most_sequences)
    runner.tap(head.layers, proposer.take)
    return proposer


def _head_config(what: str, config: Mapping[str, Any], entries: Mapping[str, Any], num_layers: int) -> HeadConfig:
    eagle = config.get("eagle_config") or {}
    for switch in _REFUSED:
        if config.get(switch) or entries.get(switch) or eagle.get(switch):
            raise UnsupportedError(f"{what}: config.json has {switch}, which is not supported")
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    layers = sorted(layers or (2, num_layers // 2, num_layers - 3))
    if len(layers) != 3 or len(set(layers)) != 3 or not all(0 <= layer <= num_layers for layer in layers):
        raise UnsupportedError(f"{what}: it reads the states of layers {layers}; this model has {num_layers} layers")
    num_heads = int(entries["num_attention_heads"])
    return HeadConfig(
        layers=tuple(layers),
        num_heads=num_heads,
        num_kv_heads=int(entries.get("num_key_value_heads") or num_heads),
        head_dim=int(entries.get("head_dim") or int(entries["hidden_size"]) // num_heads),
        eps=float(entries.get("rms_norm_eps", 1e-6)),
        norms_residual=bool(config.get("norm_before_residual", False)),
        norms_output=bool(config.get("norm_output", eagle.get("norm_output", False))),
    )


# Our names -> those of tensors, of which the first that is there is taken: `midlayer` is called `layers.0`, too.
_NAMES: Mapping[str, str] = {
    "fc": "fc.weight",
    "norm": "norm.weight",
    "input_layernorm": "layers.0.input_layernorm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "post_attention_layernorm": "layers.0.post_attention_layernorm.weight",
    "q": "layers.0.self_attn.q_proj.weight",
    "k": "layers.0.self_attn.k_proj.weight",
    "v": "layers.0.self_attn.v_proj.weight",
    "o": "layers.0.self_attn.o_proj.weight",
    "gate": "layers.0.mlp.gate_proj.weight",
    "up": "layers.0.mlp.up_proj.weight",
    "down": "layers.0.mlp.down_proj.weight",
}
_OPTIONAL: Mapping[str, str] = {"head": "lm_head.weight", "embed": "embed_tokens.weight", "d2t": "d2t"}


def _weights(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for name, stored in (*_NAMES.items(), *_OPTIONAL.items()):
        other = stored.replace("layers.0.", "midlayer.")
        if name in _OPTIONAL and stored not in checkpoint:
            continue
        tensor = checkpoint.tensor(other if other in checkpoint else stored)
        found[name] = tensor.to(device) if name == "d2t" else tensor.to(device, dtype)
    return found


def _check_shapes(
    what: str, head: HeadConfig, weights: Mapping[str, torch.Tensor], hidden_size: int, vocab_size: int
) -> None:
    own = weights["norm"].shape[0]
    width, kv_width = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    wanted = {
        "fc": (own, 3 * hidden_size),
        "q": (width, 2 * own),
        "k": (kv_width, 2 * own),
        "v": (kv_width, 2 * own),
        "o": (own, width),
    }
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise InvalidArgumentError(
                f"{what}: {_NAMES[name]} has the shape {list(weights[name].shape)}, and this model needs "
                f"{list(shape)}: the head was made for another model"
            )
    targets = weights.get("d2t")
    if targets is not None:
        ids = targets + torch.arange(len(targets), device=targets.device)
        is_known = bool(((ids >= 0) & (ids < vocab_size)).all())
        if "head" not in weights or len(weights["head"]) != len(targets) or not is_known:
            raise InvalidArgumentError(f"{what}: d2t names tokens that this model, or lm_head, does not have")
    elif "head" in weights and len(weights["head"]) > vocab_size:
        raise InvalidArgumentError(f"{what}: lm_head has {len(weights['head'])} tokens, and this model {vocab_size}")

"""A trained layer behind a network that guesses the token after the next one.

Such layers come with a checkpoint (multi-token prediction: DeepSeek V3, https://arxiv.org/abs/2412.19437, section 2.2),
or are trained for a finished network (EAGLE, https://arxiv.org/abs/2401.15077).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.kv_blocks import KvGroup
from ..attention.own_memory import OwnMemoryAttention, TextMemory
from ..attention.paged import Rotation
from ..step_context import StepContext
from .decoder import DecoderLayer, rope_tables
from .linear import Linear
from .norm import Norm, identity
from .rope import Rope

# From what tokens are before the first layer, and the states of the tokens before them, to states of the same width.
HeadLayer = Callable[[torch.Tensor, torch.Tensor, StepContext], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionNames:
    """Modules of a layer that a checkpoint carries for multi-token prediction; `layer` may name the layers' number.

    It joins the normalised embedding of a token and the states of the token before it, which `reads_normalised` says
    come after the network's last norm. `is_hidden_first`: in the joined row the states come before the embedding.
    """

    layer: str = "layers.{}"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    join: str = "eh_proj"
    norm: str = "shared_head.norm"
    is_hidden_first: bool = False
    reads_normalised: bool = True


class JoinedLayer:
    """A layer of the network's kind over an embedding and states that one matrix joins."""

    def __init__(
        self,
        layer: DecoderLayer,
        join: Linear,
        *,
        embedding_norm: Norm = identity,
        hidden_norm: Norm = identity,
        is_hidden_first: bool = False,
    ) -> None:
        self._layer = layer
        self._join = join
        self._embedding_norm = embedding_norm
        self._hidden_norm = hidden_norm
        self._is_hidden_first = is_hidden_first

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor:
        pair = (self._embedding_norm(embedded), self._hidden_norm(states))
        rows = torch.cat(pair[::-1] if self._is_hidden_first else pair, dim=-1)
        return self._layer(self._join(rows, step), step)


class DraftHead:
    """Row t reads the token t + 1 and the states of the token t, and gives states, of which `token` guesses t + 2.

    `layers`: the network's states before these layers are read, as `read` makes them. `group`, `scale` and `rope` are
    those of the one layer, which rotates by itself where `rope` is None. `feeds_normalised`: behind the text, a row
    reads the normalised states of the row before. `targets` [tokens]: how far a token of the network is from that of
    the head's own vocabulary.
    """

    def __init__(
        self,
        layer: HeadLayer,
        group: KvGroup,
        *,
        scale: float,
        rope: Rope | None,
        layers: Sequence[int],
        embed: Callable[[torch.Tensor], torch.Tensor],
        norm: Norm,
        logits: Callable[[torch.Tensor], torch.Tensor],
        read: Callable[[torch.Tensor], torch.Tensor] = identity,
        feeds_normalised: bool = True,
        targets: torch.Tensor | None = None,
        max_len: int,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.max_len = max_len
        self.read = read
        self._layer = layer
        self._embed = embed
        self._norm = norm
        self._logits = logits
        self._feeds_normalised = feeds_normalised
        self._targets = targets
        self._device = device
        self._attention: Any = OwnMemoryAttention(group, scale)
        self._tables = None if rope is None else rope_tables(*rope.tables(max_len), group.heads_dtype, device)

    def __call__(
        self, token_ids: Sequence[int], states: torch.Tensor, texts: Sequence[tuple[TextMemory, int]]
    ) -> torch.Tensor:
        """Of each text a number of rows behind those in its memory, which keeps them: [rows, width], not normalised."""
        positions = torch.cat(
            [torch.arange(memory.end, memory.end + num_rows, device=self._device) for memory, num_rows in texts]
        )
        rotations: tuple[Rotation, ...] = ()
        if self._tables is not None:
            cosines, sines = self._tables
            rotations = (Rotation(cosines[positions], sines[positions]),)
        step = StepContext(
            positions=positions,
            attention=self._attention,
            inputs=texts,
            rotations=rotations,
        )
        return self._layer(self._embed(torch.tensor(token_ids, device=self._device)), states, step)

    def tokens(self, hidden: torch.Tensor) -> list[int]:
        """The most probable one by each row of states."""
        best = self._logits(self._norm(hidden)).argmax(dim=-1)
        found: list[int] = (best if self._targets is None else best + self._targets[best]).tolist()
        return found

    def fed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the rows behind read of rows' states."""
        return self._norm(hidden) if self._feeds_normalised else hidden

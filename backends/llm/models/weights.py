"""The weights of a network: tensors of a checkpoint, and linear layers in the form that a scheme gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from modelserver.backend import give_back

from ..checkpoint import Checkpoint
from ..lora.layers import AdaptedLayers
from ..quantization.scheme import Scheme, multiplied_embedding, stored_float_linear
from .latent_attention import HeadMatrices
from .linear import GroupedLinear, HeadedEmbedding, Linear, StoredLinear, TokenEmbedding
from .linear_tensors import ALONE, LinearTensors, Part, Rank, Split, placed, stored_tensor

_AnyLayer = TypeVar("_AnyLayer", Linear, GroupedLinear, TokenEmbedding)


# Free memory, in bytes and of what layers take, that is returned to the system between two layers.
_MUCH_LEFT_BYTES, _MUCH_LEFT = 8 << 20, 0.03
# How much more memory than it takes itself a layer may leave free: what was read, in wider numbers, and copies of that.
_MOST_LEFT_BY_A_LAYER = 32


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """What a layer takes in memory. `names`: of the modules that are fused into it; of experts, those of the first."""

    names: tuple[str, ...]
    form: str
    num_bytes: int

    @property
    def kind(self) -> str:
        """What it has in common with the same layer elsewhere: `q_proj, k_proj, v_proj`."""
        return ", ".join(name.rpartition(".")[2] for name in self.names)


class Weights:
    """Reads from `checkpoint`. `is_transposed`: its linear weights are [in, out], as GPT-2 stores them.

    `layers`: what embeddings and linear layers take in memory; a head that shares its memory is not among them.
    `is_capturable`: whether all layers made so far do the same whatever their rows are; experts that are called one by
    one do not.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: Rank = ALONE,
        is_transposed: bool = False,
        adapted: AdaptedLayers | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self.layers: list[StoredLayer] = []
        self.is_capturable = True
        self._num_bytes = 0
        self._num_bytes_since = 0  # since free memory was last returned
        self._scheme = scheme
        self.is_transposed = is_transposed
        self._adapted = adapted

    def has_module(self, name: str) -> bool:
        """Whether any tensor belongs to a module, in whatever form it is stored."""
        return self.checkpoint.module(name) is not None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In the network's dtype, on its device. InvalidArgumentError if it has not the shape that the config says."""
        return placed(self.stored(name, shape), self.dtype, self.device)

    def stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As it is in the file."""
        return stored_tensor(self.checkpoint, name, shape)

    def columns(self, parts: Sequence[Part]) -> Linear:
        """Parts fused along their outputs; each rank has a share of the outputs."""
        return self._linear(parts, Split.OUTPUTS)

    def rows(self, part: Part) -> Linear:
        """Each rank has a share of the inputs: the sum over ranks is the result. The bias is with rank 0."""
        return self._linear([part], Split.INPUTS)

    def whole(self, parts: Sequence[Part]) -> Linear:
        """Parts fused along their outputs; every rank has all of them."""
        return self._linear(parts, Split.WHOLE)

    def dense(self, part: Part) -> torch.Tensor:
        """This rank's outputs of a layer as a matrix in floats, whatever form it is stored in."""
        return self._scheme.dense(self._tensors([part], Split.OUTPUTS))

    def by_head(self, name: str, weight: torch.Tensor) -> HeadMatrices:
        """Matrices [heads, outputs, inputs] of a module that a network multiplies by in another way."""
        matrices = HeadMatrices(weight)
        self.layers.append(StoredLayer((name,), matrices.form, matrices.num_bytes))
        return matrices

    def grouped_columns(self, experts: Sequence[Sequence[Part]]) -> GroupedLinear:
        return self._grouped(experts[0], [self._tensors(parts, Split.OUTPUTS) for parts in experts])

    def grouped_rows(self, experts: Sequence[Part]) -> GroupedLinear:
        return self._grouped(experts[:1], [self._tensors([part], Split.INPUTS) for part in experts])

    def floats(self, part: Part) -> Linear:
        """A layer that no scheme quantizes (a router), whole on every rank."""
        return self._counted([part], stored_float_linear(self._tensors([part], Split.WHOLE)))

    def embedding(self, part: Part, *, is_head: bool = False) -> TokenEmbedding:
        """Whole on every rank. `is_head`: the head multiplies by the same matrix, which is then held once."""
        embedding = self._scheme.embedding(self._tensors([part], Split.WHOLE))
        return self._counted([part], multiplied_embedding(embedding) if is_head else embedding)

    def head(self, part: Part) -> Linear:
        """The output projection: complete on every rank, [vocab, hidden] even if other weights are transposed."""
        return self._counted([part], self._scheme.make_linear(self._tensors([part], Split.WHOLE)))

    def tied_head(self, part: Part, embedding: TokenEmbedding) -> Linear:
        """The same of the embedding's tensors."""
        head = self._scheme.tied_head(self._tensors([part], Split.WHOLE), embedding)
        return head if isinstance(embedding, HeadedEmbedding) else self._counted([part], head)

    def _linear(self, parts: Sequence[Part], split: Split) -> Linear:
        tensors = self._tensors(parts, split)
        linear = self._counted(parts, self._scheme.make_linear(tensors))
        return linear if self._adapted is None else self._adapted.wrap(linear, tensors)

    def _grouped(self, first: Sequence[Part], experts: Sequence[LinearTensors]) -> GroupedLinear:
        grouped = self._counted(first, self._scheme.make_grouped(experts))
        self.is_capturable &= getattr(grouped, "is_capturable", False)
        return grouped

    def _counted(self, parts: Sequence[Part], layer: _AnyLayer) -> _AnyLayer:
        if isinstance(layer, StoredLinear):
            self.layers.append(StoredLayer(tuple(part.name for part in parts), layer.form, layer.num_bytes))
            self._num_bytes += layer.num_bytes
            self._num_bytes_since += layer.num_bytes
        self._give_back()
        return layer

    def _give_back(self) -> None:
        """What packing frees is not all used again by the C library, and would grow with the network.

        Small layers leave little, and to look through the memory of a process that holds much else takes milliseconds.
        """
        much = max(_MUCH_LEFT_BYTES, int(self._num_bytes * _MUCH_LEFT))
        if self._num_bytes_since * _MOST_LEFT_BY_A_LAYER >= much and give_back(much):
            self._num_bytes_since = 0

    def _tensors(self, parts: Sequence[Part], split: Split) -> LinearTensors:
        return LinearTensors(
            checkpoint=self.checkpoint,
            parts=tuple(parts),
            split=split,
            rank=self.rank,
            dtype=self.dtype,
            device=self.device,
            is_transposed=self.is_transposed,
        )

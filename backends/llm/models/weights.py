"""Takes tensors of a checkpoint as the decoder wants them: fused, in its dtype, on its device, this rank's share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modelserver.backend import InvalidArgumentError

from ..checkpoint import Checkpoint
from .linear import Linear
from .quantization import QuantizationMethod


@dataclass(frozen=True, slots=True)
class Part:
    """One stored linear layer: its name without `.weight`, and the shape that its config says it has.

    `sections` of its outputs are what a fused tensor holds (queries, keys, values): each is split over ranks by itself.
    """

    name: str
    num_inputs: int
    sections: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        return sum(self.sections)


def _alone(part: torch.Tensor) -> torch.Tensor:
    return part


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place among those that share a network. Alone: 0 of 1. `sum` adds a tensor up over all ranks."""

    index: int = 0
    size: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = _alone

    def share(self, length: int, what: str) -> slice:
        """InvalidArgumentError if it cannot be split evenly."""
        if length % self.size:
            raise InvalidArgumentError(f"tensor_parallel_size {self.size} does not divide {what} ({length})")
        part = length // self.size
        return slice(self.index * part, (self.index + 1) * part)


ALONE = Rank()


class Weights:
    """Reads from `checkpoint`. `is_transposed`: its linear weights are [in, out], as GPT-2 stores them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        method: QuantizationMethod,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: Rank = ALONE,
        is_transposed: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self.is_transposed = is_transposed
        self._method = method

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.placed(self.stored(name, shape))

    def stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As it is in the file. InvalidArgumentError if it has not the shape that the config says."""
        tensor = self.checkpoint.tensor(name)
        if tensor.shape != shape:
            raise InvalidArgumentError(
                f"the checkpoint in {self.checkpoint.place} has {name} of shape {list(tensor.shape)}, and its "
                f"config.json says {list(shape)}: they do not belong together"
            )
        return tensor

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Nothing but the tensor itself: a part of another would keep all of that alive."""
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        return tensor.to(device=self.device, dtype=self.dtype, copy=is_part).contiguous()

    def columns(self, parts: Sequence[Part]) -> Linear:
        """Parts fused along their outputs; each rank has a share of the outputs."""
        return self._method(_Tensors(self, tuple(parts), "outputs"))

    def head(self, part: Part) -> Linear:
        """What gives logits: whole on every rank, [vocab, hidden] even where other weights are transposed."""
        return self._method(_Tensors(self, (part,), "whole"))

    def rows(self, part: Part) -> Linear:
        """Each rank has a share of the inputs: the sum over ranks is the result. The bias is with rank 0."""
        return self._method(_Tensors(self, (part,), "inputs"))


@dataclass(frozen=True, slots=True)
class _Tensors:
    """`LinearTensors` of parts in a checkpoint; `split` is "outputs", "inputs" or "whole"."""

    weights: Weights
    parts: tuple[Part, ...]
    split: str

    def weight(self) -> torch.Tensor:
        if len(self.parts) == 1:
            (part,) = self.parts
            return self.weights.placed(self._cut(part, self._matrix(part)))
        return torch.cat([self.weights.placed(self._cut(part, self._matrix(part))) for part in self.parts])

    def bias(self) -> torch.Tensor | None:
        names = [f"{part.name}.bias" for part in self.parts]
        present = [name in self.weights for name in names]
        if not any(present):
            return None
        if self.split == "inputs" and self.weights.rank.index:
            return None
        vectors = [
            self.weights.stored(name, (part.num_outputs,)) if is_there else torch.zeros(part.num_outputs)
            for part, name, is_there in zip(self.parts, names, present, strict=True)
        ]
        if self.split == "outputs":
            vectors = [self._cut_outputs(part, vector) for part, vector in zip(self.parts, vectors, strict=True)]
        return self.weights.placed(torch.cat([vector.to(self.weights.dtype) for vector in vectors]))

    def stored(self, suffix: str) -> list[torch.Tensor]:
        return [self.weights.checkpoint.tensor(f"{part.name}.{suffix}") for part in self.parts]

    def _matrix(self, part: Part) -> torch.Tensor:
        shape = (part.num_outputs, part.num_inputs)
        if self.weights.is_transposed and self.split != "whole":
            return self.weights.stored(f"{part.name}.weight", shape[::-1]).t()
        return self.weights.stored(f"{part.name}.weight", shape)

    def _cut(self, part: Part, matrix: torch.Tensor) -> torch.Tensor:
        if self.split == "inputs":
            return matrix[:, self.weights.rank.share(matrix.shape[1], f"the inputs of {part.name}")]
        return self._cut_outputs(part, matrix) if self.split == "outputs" else matrix

    def _cut_outputs(self, part: Part, tensor: torch.Tensor) -> torch.Tensor:
        rank = self.weights.rank
        if rank.size == 1:
            return tensor
        sections = tensor.split(part.sections)
        return torch.cat([section[rank.share(section.shape[0], f"the outputs of {part.name}")] for section in sections])

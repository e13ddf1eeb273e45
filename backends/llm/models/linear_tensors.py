"""The tensors of one linear layer as its checkpoint stores them, and this rank's share of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from modelserver.backend import InvalidArgumentError

from ..checkpoint import Checkpoint

# Datatypes of stored weights that need no scales.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Part:
    """One stored linear layer: the name of its module, and the shape that the config says it has.

    `sections` of its outputs are what a fused tensor holds (queries, keys, values): each is split over ranks by itself.
    """

    name: str
    num_inputs: int
    sections: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        return sum(self.sections)


class Split(enum.Enum):
    """The dimension that is split over ranks."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"  # the sum over ranks is the result; the bias is with rank 0
    WHOLE = "whole"  # nothing: every rank has it all


def _alone(part: torch.Tensor) -> torch.Tensor:
    return part


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place among those that share a network. Alone: 0 of 1. `sum` adds a tensor up over all ranks.

    `abort` ends sums under way, where these wait on a GPU for a rank that may have ended.
    """

    index: int = 0
    size: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = _alone
    abort: Callable[[], None] | None = None

    def share(self, length: int, what: str) -> slice:
        """InvalidArgumentError if it cannot be split evenly."""
        if length % self.size:
            raise InvalidArgumentError(f"tensor_parallel_size {self.size} does not divide {what} ({length})")
        part = length // self.size
        return slice(self.index * part, (self.index + 1) * part)


ALONE = Rank()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTensors:
    """The tensors from which a scheme makes a linear layer: its `parts` lie side by side along its outputs.

    `dtype` and `device` are the network's. `is_transposed`: weights are stored as [in, out].
    """

    checkpoint: Checkpoint
    parts: tuple[Part, ...]
    split: Split
    rank: Rank
    dtype: torch.dtype
    device: torch.device
    is_transposed: bool = False

    @property
    def names(self) -> list[str]:
        """The checkpoint's names of the parts' modules, as in its quantization config."""
        return [self.checkpoint.module(part.name) or part.name for part in self.parts]

    def each(self) -> list[LinearTensors]:
        """The parts as layers of their own."""
        return [replace(self, parts=(part,)) for part in self.parts]

    def weight(self) -> torch.Tensor:
        """Of a layer in floats: this rank's [out_features, in_features] of all parts, in the network's dtype."""
        return self._joined([self._matrix(part) for part in self.parts], self.dtype)

    def stored_weight(self) -> torch.Tensor:
        """The same in the checkpoint's dtype, if all parts have one, in which a weight takes less memory."""
        matrices = [self._matrix(part) for part in self.parts]
        dtypes = {matrix.dtype for matrix in matrices}
        is_smaller = len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} and self.dtype is torch.float32
        return self._joined(matrices, dtypes.pop() if is_smaller else self.dtype)

    @property
    def num_outputs(self) -> int:
        """Of all parts, whole."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def is_in_rows(self) -> bool:
        """Whether this rank has all rows of its parts, each stored in one place."""
        is_whole = self.rank.size == 1 or self.split is Split.WHOLE
        return is_whole and (self.split is Split.WHOLE or not self.is_transposed)

    def rows(self, part: Part, suffix: str, shape: tuple[int, int], length: int) -> Iterator[torch.Tensor]:
        """A matrix of a part, some `length` elements after the others: what it takes does not grow with the matrix.

        InvalidArgumentError if it is missing or of another shape.
        """
        name, (num_rows, row_length) = f"{part.name}.{suffix}", shape
        check_shape(self.checkpoint, name, shape)
        step = max(1, length // max(1, row_length))
        for first in range(0, num_rows, step):
            yield self.checkpoint.rows(name, first, min(step, num_rows - first))

    def weight_rows(self, length: int) -> Iterator[torch.Tensor]:
        """`weight` in the checkpoint's dtypes, some `length` values after the others. For `is_in_rows` alone."""
        for part in self.parts:
            for piece in self.rows(part, "weight", (part.num_outputs, part.num_inputs), length):
                yield checked_dtype(self.checkpoint, f"{part.name}.weight", piece, FLOATS)

    def bias(self) -> torch.Tensor | None:
        """This rank's [out_features], in the network's dtype; zeros for parts without any."""
        names = [f"{part.name}.bias" for part in self.parts]
        present = [name in self.checkpoint for name in names]
        if not any(present) or (self.split is Split.INPUTS and self.rank.index):
            return None
        vectors = [
            self.stored(part, "bias", (part.num_outputs,)) if is_there else torch.zeros(part.num_outputs)
            for part, is_there in zip(self.parts, present, strict=True)
        ]
        shares = [self.share(part, vector, outputs=0) for part, vector in zip(self.parts, vectors, strict=True)]
        return self.placed(torch.cat([share.to(self.dtype) for share in shares]))

    def has(self, part: Part, suffix: str) -> bool:
        return f"{part.name}.{suffix}" in self.checkpoint

    def stored(
        self,
        part: Part,
        suffix: str,
        shape: tuple[int, ...] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> torch.Tensor:
        """A tensor of a part as it is in the file, whole.

        InvalidArgumentError if it is missing, of another shape, or of none of the `dtypes`.
        """
        return stored_tensor(self.checkpoint, f"{part.name}.{suffix}", shape, dtypes)

    def vector(self, part: Part, suffix: str, dtypes: Sequence[torch.dtype], *, longest: int) -> torch.Tensor:
        """A vector of a part that describes its other tensors. Raises as `stored`, before more than that is read."""
        shape = self.checkpoint.shape(f"{part.name}.{suffix}")
        if len(shape) != 1 or shape[0] > longest:
            raise InvalidArgumentError(
                f"the checkpoint in {self.checkpoint.place} has {part.name}.{suffix} of shape {list(shape)}, expected "
                f"at most {longest} values"
            )
        return self.stored(part, suffix, shape, dtypes)

    def share(
        self, part: Part, tensor: torch.Tensor, *, outputs: int | None = None, inputs: int | None = None
    ) -> torch.Tensor:
        """This rank's share of a part's tensor, whose dimensions `outputs` and `inputs` run along those of the layer.

        A dimension may be shorter than the layer's where it packs or groups them: groups are not cut. A tensor without
        the dimension that is split is every rank's.
        """
        if self.rank.size == 1:
            return tensor
        if self.split is Split.INPUTS and inputs is not None:
            share = self.rank.share(tensor.shape[inputs], f"the inputs of {part.name}")
            return tensor.narrow(inputs, share.start, share.stop - share.start)
        if self.split is Split.OUTPUTS and outputs is not None:
            per = part.num_outputs // tensor.shape[outputs]
            if any(section % per for section in part.sections):
                raise InvalidArgumentError(f"the outputs of {part.name} are packed by {per}: sections are not whole")
            sections = tensor.split([section // per for section in part.sections], dim=outputs)
            shares = [self.rank.share(section.shape[outputs], f"the outputs of {part.name}") for section in sections]
            return torch.cat(
                [
                    section.narrow(outputs, share.start, share.stop - share.start)
                    for section, share in zip(sections, shares, strict=True)
                ],
                dim=outputs,
            )
        return tensor

    def check_floats(self, part: Part) -> None:
        """InvalidArgumentError if a part's weight is missing, or is none in floats of its shape."""
        self._matrix(part)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the network's device, in its dtype, and nothing but the tensor itself."""
        return placed(tensor, self.dtype, self.device)

    def _joined(self, matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's shares of the parts' matrices, below each other."""
        shares = [self.share(part, one, outputs=0, inputs=1) for part, one in zip(self.parts, matrices, strict=True)]
        found = [placed(share, dtype, self.device) for share in shares]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _matrix(self, part: Part) -> torch.Tensor:
        shape = (part.num_outputs, part.num_inputs)
        if self.is_transposed and self.split is not Split.WHOLE:
            return self.stored(part, "weight", shape[::-1], FLOATS).t()
        return self.stored(part, "weight", shape, FLOATS)


def stored_tensor(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...] | None, dtypes: Sequence[torch.dtype] | None = None
) -> torch.Tensor:
    """As it is in the file. InvalidArgumentError if it has not the shape that the config says, or another dtype."""
    if shape is not None:
        check_shape(checkpoint, name, shape)
    tensor = checkpoint.tensor(name)
    return tensor if dtypes is None else checked_dtype(checkpoint, name, tensor, dtypes)


def check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """InvalidArgumentError if a tensor has not the shape that the config says."""
    found = checkpoint.shape(name)
    if found != shape:
        raise InvalidArgumentError(
            f"the checkpoint in {checkpoint.place} has {name} of shape {list(found)}, and its "
            f"{'metadata say' if checkpoint.place.is_file() else 'config.json says'} {list(shape)}: they do not belong "
            "together"
        )


def checked_dtype(
    checkpoint: Checkpoint, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> torch.Tensor:
    """What was read of a tensor. InvalidArgumentError if it is in another dtype."""
    if tensor.dtype not in dtypes:
        known = ", ".join(_dtype_name(dtype) for dtype in dtypes)
        raise InvalidArgumentError(
            f"the checkpoint in {checkpoint.place} has {name} in {_dtype_name(tensor.dtype)}, expected {known}"
        )
    return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def placed(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A part of another tensor would keep all of that alive, so it is copied."""
    is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to(device=device, dtype=dtype, copy=is_part).contiguous()

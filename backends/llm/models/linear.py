"""Token embedding, and linear layers, alone and grouped by experts, in the forms that a device multiplies fastest."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F

from ..step_context import StepContext


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TokenEmbedding(Protocol):
    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """[tokens] -> [tokens, hidden_size], in the dtype of the network."""
        ...


class DenseEmbedding:
    """`weight` [vocab_size, hidden_size] in the dtype of the network."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.form = dtype_name(weight.dtype)
        self.num_bytes = weight.nbytes

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


# oneDNN's packed product costs some 10 us before it multiplies. Matrices of fewer values are done by then; of those
# between, BLAS has few rows done by then, so they are kept in both forms (measured: 128 x 256, and 768 x 128).
_SMALLEST_PACKED = 1 << 15
_LARGEST_IN_BOTH = 1 << 17
_FEW_ROWS = 8
# How many outputs lie together in oneDNN's orders, and how many of the first are compared with a weight.
_BLOCK_OUTPUTS = (64, 48, 32, 16, 8)
_OUTPUTS_COMPARED = 130


class Linear(Protocol):
    """y = x W^T + b for rows x [rows, in_features].

    `step` is that of the rows, which are its tokens; None for rows that are others (the head's, those of experts).
    """

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        """residual + y; the residual may be changed in place."""
        ...


@runtime_checkable
class HeadedEmbedding(TokenEmbedding, Protocol):
    """An embedding whose matrix the head of a network may multiply by as well, in the same memory."""

    def head(self) -> Linear: ...


@runtime_checkable
class StoredLinear(Protocol):
    """A layer that says in which form its weights are in memory, and how many bytes they take."""

    form: str
    num_bytes: int


class PlainLinear:
    """`weight` [out_features, in_features] as checkpoints store it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.form = dtype_name(weight.dtype)
        self.num_bytes = weight.nbytes
        self._transposed = weight.t()
        self.bias = bias

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        if self.bias is not None:
            residual = residual.add_(self.bias)
        return residual.addmm_(rows, self._transposed)


class PackedLinear:
    """For the CPU: the weight in oneDNN's own order, from 8 rows on 2 to 5 times as fast as BLAS (measured)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        self.form = f"{dtype_name(weight.dtype)} by oneDNN"
        self.num_bytes = weight.nbytes
        self._bias = bias

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self._bias, "none", [], "")

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self.weight, self._bias, "add")


class PackedEmbedding:
    """The rows of the tokens that are asked for, of a matrix in oneDNN's own order, which the head multiplies by."""

    def __init__(self, linear: PackedLinear, blocks: torch.Tensor, num_inputs: int) -> None:
        """`blocks`: the memory of `linear`, as `_blocks_of` finds it."""
        self._linear = linear
        self._blocks = blocks
        self._num_inputs = num_inputs
        self.form, self.num_bytes = linear.form, linear.num_bytes

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return _rows_of(self._blocks, token_ids, self._num_inputs)

    def head(self) -> PackedLinear:
        """The layer of the same matrix, in the same memory."""
        return self._linear


def packed_embedding(weight: torch.Tensor) -> PackedEmbedding | None:
    """Of [vocab_size, hidden_size]. None where oneDNN does not multiply it, or has it in an order unknown here."""
    if not isinstance(linear := float_linear(weight, None), PackedLinear):
        return None
    blocks = _blocks_of(linear.weight, weight)
    return None if blocks is None else PackedEmbedding(linear, blocks, weight.shape[1])


def _blocks_of(packed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's memory as [blocks, inputs / n, outputs of a block, n]: n of the inputs of an output are neighbours.

    Its library does not say which order it has taken, so each that is known is compared with the weight.
    """
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    num_bytes, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    memory = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)))
    memory = memory.view(weight.dtype)
    vocab_size, hidden_size = weight.shape
    # Blocks lie one after the other, so an order that has the first of them right, and some of all others, is the one.
    compared = torch.cat((torch.arange(vocab_size)[:_OUTPUTS_COMPARED], torch.linspace(0, vocab_size - 1, 256).long()))
    for num_outputs, each in itertools.product(_BLOCK_OUTPUTS, (1, 2)):
        block_len, rest = divmod(memory.numel(), -(-vocab_size // num_outputs))
        if rest or block_len % (num_outputs * each) or block_len < num_outputs * hidden_size:
            continue
        blocks = memory.view(-1, block_len // (num_outputs * each), num_outputs, each)
        if torch.equal(_rows_of(blocks, compared, hidden_size), weight[compared]):
            return blocks
    return None


def _rows_of(blocks: torch.Tensor, outputs: torch.Tensor, num_inputs: int) -> torch.Tensor:
    num_outputs = blocks.shape[2]
    return blocks[outputs // num_outputs, :, outputs % num_outputs].flatten(1)[:, :num_inputs].contiguous()


class SummedLinear:
    """A layer of whose result each rank has a part; `sum_ranks` adds them up, in place, on all."""

    def __init__(self, linear: Linear, sum_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._linear = linear
        self._sum_ranks = sum_ranks

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return self._sum_ranks(self._linear(rows, step))

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))


class JoinedLinear:
    """Layers of the same rows, whose results stand side by side: parts of one layer in unlike forms."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = tuple(linears)
        self.form, self.num_bytes = _stored_form(linears)

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return torch.cat([linear(rows, step) for linear in self._linears], dim=-1)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))


def _stored_form(linears: Sequence[Linear]) -> tuple[str, int]:
    """The forms of several layers, and the bytes of all."""
    stored = [linear for linear in linears if isinstance(linear, StoredLinear)]
    forms = dict.fromkeys(linear.form for linear in stored)
    return " and ".join(forms), sum(linear.num_bytes for linear in stored)


class SmallLinear:
    """Plain for few rows, packed for many."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._plain = PlainLinear(weight, bias)
        self._packed = PackedLinear(weight, bias)
        self.form = self._packed.form
        self.num_bytes = self._plain.num_bytes + self._packed.num_bytes

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return self._plain(rows, step) if rows.shape[0] <= _FEW_ROWS else self._packed(rows, step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        chosen = self._plain if rows.shape[0] <= _FEW_ROWS else self._packed
        return chosen.add_to(residual, rows, step)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies matrices of a type on this CPU; it refuses bfloat16 without AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(torch.zeros(64, 64, dtype=dtype), None)(torch.zeros(2, 64, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for it (AVX512-BF16, AMX); without them oneDNN converts and is slower."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_instructions = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    return bool(has_instructions) and can_pack(torch.bfloat16)


def float_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest form of a weight on the device where it lies, for rows of its datatype."""
    is_packable = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    if is_packable and weight.numel() >= _SMALLEST_PACKED and can_pack(weight.dtype):
        return (SmallLinear if weight.numel() <= _LARGEST_IN_BOTH else PackedLinear)(weight, bias)
    return PlainLinear(weight, bias)


class GroupedLinear(Protocol):
    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        """`rows` [rows, in_features] are sorted by expert; expert i has `counts[i]` of them -> [rows, out_features].

        `counts` int64 [experts] is on the device of the rows.
        """
        ...


class ListedLinears:
    """A linear layer for each expert; those without rows compute nothing."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = tuple(linears)
        self.form, self.num_bytes = _stored_form(linears)

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        # The rows are not those of the step: they are sorted, and occur once for each of their experts.
        outputs = [linear(part, None) for linear, part in zip(self._linears, parts, strict=True) if part.shape[0]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

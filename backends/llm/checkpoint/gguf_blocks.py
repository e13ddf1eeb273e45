"""What the blocks of GGUF's quantized types say, exactly: small codes with scales and minima.

Each reader takes bytes, uint8 [blocks, bytes of a block]. A scale is multiplied with its sub-scale first, and then with
the small integers: that is the order that the type defines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .gguf_codebooks import codebook
from .gguf_types import TensorType

# Values that are unpacked at once: few enough for what lies between to stay in a cache.
_CHUNK_VALUES = 1 << 20

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Those of E2M1 twice as large; a block's scale is half as large for it.
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def plain_dtype(kind: TensorType) -> torch.dtype | None:
    """Of a type whose values are stored one by one; None for blocks."""
    return _PLAIN.get(kind.name)


def unpack_rows(kind: TensorType, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, bytes of a row] -> [rows, values of a row]; a plain type keeps its own dtype, whatever `dtype` says."""
    plain = plain_dtype(kind)
    if plain is not None:
        return rows.view(plain)
    num_rows, row_bytes = rows.shape
    num_blocks = row_bytes // kind.block_bytes
    values = torch.empty(num_rows, num_blocks * kind.block_len, dtype=dtype, device=rows.device)
    step = max(1, _CHUNK_VALUES // max(1, values.shape[1]))
    for first in range(0, num_rows, step):
        blocks = rows[first : first + step].reshape(-1, kind.block_bytes)
        part = values[first : first + step]
        part.copy_(describe(kind, blocks).values().view(part.shape))
    return values


def _halves(blocks: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """float32 [blocks, count] of the float16 numbers from byte `at` on."""
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()


def _signed(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return blocks[:, start:stop].contiguous().view(torch.int8)


def _fields(packed: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """[blocks, bytes] -> [blocks, bytes * 8 / bits]: of `group` bytes the lowest fields, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    groups = packed.reshape(packed.shape[0], -1, 1, group) >> shifts.view(1, 1, -1, 1)
    return (groups & ((1 << bits) - 1)).flatten(1)


def _flags(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] -> [..., 8 * bytes], the lowest bit of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _words(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """int64 [blocks, n] of little-endian integers, unsigned."""
    found = blocks[:, start:stop].contiguous().view(dtype).long()
    return found & ((1 << (8 * dtype.itemsize)) - 1)


def _eighths(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 32] -> [blocks, 256]: bit i of the 32 bytes belongs to the i-th 32 values."""
    return _flags(packed).view(-1, 32, 8).transpose(1, 2).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one type, without a rounding: each tensor is [blocks, n].

    A value is `scale * (code - zero) - min`, or `scale * table[code]`. `group` codes share a scale and a min, of which
    all of a block are times its factor. `bits`: how many the codes have.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    bits: int
    zero: int = 0
    mins: torch.Tensor | None = None
    scale_factors: torch.Tensor | None = None
    min_factors: torch.Tensor | None = None
    table: tuple[int, ...] | None = None

    def values(self) -> torch.Tensor:
        """float32 [blocks, values]"""
        if self.table is None:
            codes = self.codes.float() - self.zero
        else:
            codes = torch.tensor(self.table, dtype=torch.float32, device=self.codes.device)[self.codes.long()]
        grouped = codes.view(codes.shape[0], self.scales.shape[1], -1)
        grouped *= _times(self.scales, self.scale_factors).unsqueeze(-1)
        if self.mins is not None:
            grouped -= _times(self.mins, self.min_factors).unsqueeze(-1)
        return grouped.flatten(1)


def _times(values: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return values.float() if factors is None else factors.float() * values


def describe(kind: TensorType, blocks: torch.Tensor) -> Blocks:
    """Of uint8 [blocks, bytes of a block]."""
    return _READERS[kind.name](blocks)


def _half(stored: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [blocks, 1]"""
    return stored[:, at : at + 2].contiguous().view(torch.float16)


def _q1_0(stored: torch.Tensor) -> Blocks:
    return Blocks(codes=_flags(stored[:, 2:]), scales=_half(stored, 0), group=128, bits=1, table=(-1, 1))


def _q4_0(stored: torch.Tensor) -> Blocks:
    return Blocks(codes=_fields(stored[:, 2:], 4, 16), scales=_half(stored, 0), group=32, bits=4, zero=8)


def _q4_1(stored: torch.Tensor) -> Blocks:
    codes = _fields(stored[:, 4:], 4, 16)
    return Blocks(codes=codes, scales=_half(stored, 0), group=32, bits=4, mins=-_half(stored, 2))


def _q5_0(stored: torch.Tensor) -> Blocks:
    codes = _fields(stored[:, 6:], 4, 16) | _flags(stored[:, 2:6]) << 4
    return Blocks(codes=codes, scales=_half(stored, 0), group=32, bits=5, zero=16)


def _q5_1(stored: torch.Tensor) -> Blocks:
    codes = _fields(stored[:, 8:], 4, 16) | _flags(stored[:, 4:8]) << 4
    return Blocks(codes=codes, scales=_half(stored, 0), group=32, bits=5, mins=-_half(stored, 2))


def _q8_0(stored: torch.Tensor) -> Blocks:
    return Blocks(codes=_signed(stored, 2, 34), scales=_half(stored, 0), group=32, bits=8)


def _q2_k(stored: torch.Tensor) -> Blocks:
    return Blocks(
        codes=_fields(stored[:, 16:80], 2, 32),
        scales=stored[:, :16] & 15,
        group=16,
        bits=2,
        mins=stored[:, :16] >> 4,
        scale_factors=_half(stored, 80),
        min_factors=_half(stored, 82),
    )


def _q3_k(stored: torch.Tensor) -> Blocks:
    """The sixteen scales in its 12 bytes are 32 less than what is stored."""
    packed = stored[:, 96:108]
    scales = (_fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4).to(torch.int8) - 32
    codes = _fields(stored[:, 32:96], 2, 32) | _eighths(stored[:, :32]) << 2
    return Blocks(codes=codes, scales=scales, group=16, bits=3, zero=4, scale_factors=_half(stored, 108))


def _q4_k(stored: torch.Tensor) -> Blocks:
    return _with_minima(stored, _fields(stored[:, 16:], 4, 32), bits=4)


def _q5_k(stored: torch.Tensor) -> Blocks:
    return _with_minima(stored, _fields(stored[:, 48:], 4, 32) | _eighths(stored[:, 16:48]) << 4, bits=5)


def _with_minima(stored: torch.Tensor, codes: torch.Tensor, *, bits: int) -> Blocks:
    """Eight scales and minima, of 6 bits each, in 12 bytes."""
    first, second, third = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    return Blocks(
        codes=codes,
        scales=torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1),
        group=32,
        bits=bits,
        mins=torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1),
        scale_factors=_half(stored, 0),
        min_factors=_half(stored, 2),
    )


def _q6_k(stored: torch.Tensor) -> Blocks:
    codes = _fields(stored[:, :128], 4, 64) | _fields(stored[:, 128:192], 2, 32) << 4
    scales = _signed(stored, 192, 208)
    return Blocks(codes=codes, scales=scales, group=16, bits=6, zero=32, scale_factors=_half(stored, 208))


def _iq4_nl(stored: torch.Tensor) -> Blocks:
    codes = _fields(stored[:, 2:], 4, 16)
    return Blocks(codes=codes, scales=_half(stored, 0), group=32, bits=4, table=_IQ4_VALUES)


def _iq4_xs(stored: torch.Tensor) -> Blocks:
    codes = _fields(stored[:, 8:], 4, 16)
    scales = (_fields(stored[:, 4:8], 4, 1) | _fields(stored[:, 2:4], 2, 1) << 4).to(torch.int8) - 32
    return Blocks(codes=codes, scales=scales, group=32, bits=4, table=_IQ4_VALUES, scale_factors=_half(stored, 0))


def _mxfp4(stored: torch.Tensor) -> Blocks:
    """Scales half as large: 2 ** (e - 128), exact in bfloat16, the smallest ones too."""
    exponent = stored[:, :1].int()
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    scales = bits.view(torch.float32).bfloat16()
    return Blocks(codes=_fields(stored[:, 1:], 4, 16), scales=scales, group=32, bits=4, table=_FP4_VALUES)


def _nvfp4(stored: torch.Tensor) -> Blocks:
    """Scales in e4m3, half as large; 0 and the code of not-a-number are zero."""
    packed = stored[:, :4]
    exponent, mantissa = (packed >> 3 & 15).float(), (packed & 7).float()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (1.0 + mantissa / 8.0) * torch.exp2(exponent - 7.0))
    scales = torch.where((packed == 0) | (packed == 0x7F), 0.0, value * 0.5).half()
    return Blocks(codes=_fields(stored[:, 4:], 4, 8), scales=scales, group=16, bits=4, table=_FP4_VALUES)


def _tq1_0(stored: torch.Tensor) -> Blocks:
    """Codes from 0 to 2: five digits of base three in a byte, as a fraction; four in each of the last bytes."""

    def digits(packed: torch.Tensor, count: int) -> torch.Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8, device=packed.device)
        fractions = packed.unsqueeze(1) * powers.view(1, -1, 1)  # what exceeds a byte is dropped
        return (fractions.int() * 3 >> 8).to(torch.uint8).flatten(1)

    codes = torch.cat((digits(stored[:, :32], 5), digits(stored[:, 32:48], 5), digits(stored[:, 48:52], 4)), dim=1)
    return Blocks(codes=codes, scales=_half(stored, 52), group=256, bits=2, zero=1)


def _tq2_0(stored: torch.Tensor) -> Blocks:
    return Blocks(codes=_fields(stored[:, :64], 2, 32), scales=_half(stored, 64), group=256, bits=2, zero=1)


def _signs(packed: torch.Tensor) -> torch.Tensor:
    """Minus one where a bit is set: [..., n] bytes -> [..., n, 8]."""
    shifts = torch.arange(8, device=packed.device)
    return 1.0 - 2.0 * (packed.unsqueeze(-1).long() >> shifts & 1).float()


def _even_signs(packed: torch.Tensor) -> torch.Tensor:
    """The same of seven bits; the eighth makes the number of minuses even."""
    folded = packed ^ packed >> 4
    folded = folded ^ folded >> 2
    parity = (folded ^ folded >> 1) & 1
    return _signs(packed | parity << 7)


def _book(name: str, indexes: torch.Tensor) -> torch.Tensor:
    return codebook(name).to(indexes.device)[indexes]


Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _iq2_xxs(blocks: torch.Tensor) -> Vectors:
    """For each 32 values four bytes of indexes, then four times seven signs and a scale of four bits."""
    indexes = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4].long()
    packed = _words(blocks, 2, 66, torch.int32)[:, 1::2]
    shifts = torch.arange(0, 28, 7, device=blocks.device)
    signs = _even_signs(packed.unsqueeze(-1) >> shifts & 127)
    return _book("IQ2_XXS", indexes) * signs, 2 * (packed >> 28) + 1, _halves(blocks, 0) * 0.125


def _iq2_xs(blocks: torch.Tensor) -> Vectors:
    packed = _words(blocks, 2, 66, torch.int16)
    values = _book("IQ2_XS", packed & 511) * _even_signs(packed >> 9)
    return values, 2 * _fields(blocks[:, 66:74], 4, 1) + 1, _halves(blocks, 0) * 0.125


def _iq2_s(blocks: torch.Tensor) -> Vectors:
    indexes = blocks[:, 2:34].long() | _fields(blocks[:, 66:74], 2, 1).long() << 8
    values = _book("IQ2_S", indexes) * _signs(blocks[:, 34:66])
    return values, 2 * _fields(blocks[:, 74:82], 4, 1) + 1, _halves(blocks, 0) * 0.125


def _iq3_xxs(blocks: torch.Tensor) -> Vectors:
    packed = _words(blocks, 66, 98, torch.int32)
    shifts = torch.arange(0, 28, 7, device=blocks.device)
    signs = _even_signs(packed.unsqueeze(-1) >> shifts & 127)
    values = _book("IQ3_XXS", blocks[:, 2:66].long()).view(-1, 8, 4, 8) * signs
    return values, 2 * (packed >> 28) + 1, _halves(blocks, 0) * 0.25


def _iq3_s(blocks: torch.Tensor) -> Vectors:
    indexes = blocks[:, 2:66].long() | _flags(blocks[:, 66:74]).long() << 8
    values = _book("IQ3_S", indexes).view(-1, 32, 8) * _signs(blocks[:, 74:106])
    return values, 2 * _fields(blocks[:, 106:110], 4, 1) + 1, _halves(blocks, 0)


def _iq1_s(blocks: torch.Tensor) -> Vectors:
    """For each 32 values four indexes of 11 bits, a scale of three bits, and which way all are moved by 1/8."""
    high = _words(blocks, 34, 50, torch.int16)
    shifts = torch.arange(0, 12, 3, device=blocks.device)
    indexes = blocks[:, 2:34].reshape(-1, 8, 4).long() | (high.unsqueeze(-1) >> shifts & 7) << 8
    moved = torch.where(high >> 15 == 1, -0.125, 0.125)[:, :, None, None]
    return _book("IQ1_S", indexes) + moved, 2 * (high >> 12 & 7) + 1, _halves(blocks, 0)


def _iq1_m(blocks: torch.Tensor) -> Vectors:
    """As IQ1_S, with a scale for each 16 values and a move for each 8. The block's own scale lies in spare bits."""
    packed = _words(blocks, 48, 56, torch.int16)
    places = torch.arange(0, 16, 4, device=blocks.device)
    whole = ((packed >> 12) << places).sum(dim=1, keepdim=True).to(torch.int16).view(torch.float16).float()
    shifts = torch.arange(0, 12, 3, device=blocks.device)
    scales = 2 * (packed.unsqueeze(-1) >> shifts & 7).flatten(1) + 1
    high = _fields(blocks[:, 32:48], 4, 1).long()
    values = _book("IQ1_S", blocks[:, :32].long() | (high & 7) << 8)
    return values + torch.where(high & 8 == 8, -0.125, 0.125).unsqueeze(-1), scales, whole


# Of the types with a codebook: values [blocks, ...], odd integers for each group of them, and a scale for each block.
_VECTORS: dict[str, Callable[[torch.Tensor], Vectors]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def _from_vectors(
    name: str, values: tuple[int, ...], *, group: int, divided: float
) -> Callable[[torch.Tensor], Blocks]:
    """Of an IQ type: its scales of groups are odd numbers, its values `values` times 1 / `divided`, or minus them.

    They are at most 16 different ones, which become a table, so that they take 4 bits.
    """
    table = (*values, *(-value for value in values))
    size = 1 + max(values)
    codes_of = torch.zeros(2 * size, dtype=torch.uint8)
    codes_of[[value + size for value in table]] = torch.arange(len(table), dtype=torch.uint8)

    def read(stored: torch.Tensor) -> Blocks:
        vectors, scales, factors = _VECTORS[name](stored)
        codes = codes_of.to(stored.device)[(vectors * divided).to(torch.int64) + size]
        return Blocks(
            codes=codes.flatten(1),
            scales=scales.to(torch.uint8),
            group=group,
            bits=4,
            table=table,
            scale_factors=factors / divided,
        )

    return read


_READERS: dict[str, Callable[[torch.Tensor], Blocks]] = {
    "Q1_0": _q1_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ2_XXS": _from_vectors("IQ2_XXS", (8, 25, 43), group=32, divided=1.0),
    "IQ2_XS": _from_vectors("IQ2_XS", (8, 25, 43), group=16, divided=1.0),
    "IQ2_S": _from_vectors("IQ2_S", (8, 25, 43), group=16, divided=1.0),
    "IQ3_XXS": _from_vectors("IQ3_XXS", (4, 12, 20, 28, 36, 44, 52, 62), group=32, divided=1.0),
    "IQ3_S": _from_vectors("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15), group=32, divided=1.0),
    "IQ1_S": _from_vectors("IQ1_S", (1, 7, 9), group=32, divided=8.0),
    "IQ1_M": _from_vectors("IQ1_M", (1, 7, 9), group=16, divided=8.0),
}

"""Blocks of GGUF's quantized types as the numbers that they stand for, exactly.

Each unpacker takes bytes, uint8 [blocks, bytes of a block], and gives float32 [blocks, values of a block]. A scale is
multiplied with its sub-scale first, and then with the small integers: that is the order that the type defines.
"""

from __future__ import annotations

from collections.abc import Callable

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
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Those of E2M1 twice as large; a block's scale is half as large for it.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


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
    unpack = _UNPACKERS[kind.name]
    values = torch.empty(num_rows, num_blocks * kind.block_len, dtype=dtype, device=rows.device)
    step = max(1, _CHUNK_VALUES // max(1, values.shape[1]))
    for first in range(0, num_rows, step):
        blocks = rows[first : first + step].reshape(-1, kind.block_bytes)
        part = values[first : first + step]
        part.copy_(unpack(blocks).view(part.shape))
    return values


def halves(blocks: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """float32 [blocks, count] of the float16 numbers from byte `at` on."""
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()


def signed(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return blocks[:, start:stop].contiguous().view(torch.int8)


def fields(packed: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """[blocks, bytes] -> [blocks, bytes * 8 / bits]: of `group` bytes the lowest fields, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    groups = packed.reshape(packed.shape[0], -1, 1, group) >> shifts.view(1, 1, -1, 1)
    return (groups & ((1 << bits) - 1)).flatten(1)


def flags(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] -> [..., 8 * bytes], the lowest bit of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def words(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """int64 [blocks, n] of little-endian integers, unsigned."""
    found = blocks[:, start:stop].contiguous().view(dtype).long()
    return found & ((1 << (8 * dtype.itemsize)) - 1)


def scaled(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[blocks, groups] times [blocks, values], a scale for each group of values."""
    grouped = codes.float().view(codes.shape[0], scales.shape[1], -1)
    return (scales.unsqueeze(-1) * grouped).flatten(1)


def scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and minima, of 6 bits each, in the 12 bytes of Q4_K and Q5_K; uint8 [blocks, 8] of both."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    return scales, torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)


def q3_scales(packed: torch.Tensor) -> torch.Tensor:
    """The sixteen scales of Q3_K in its 12 bytes, less the 32 that they are stored with: int8 [blocks, 16]."""
    low = fields(packed[:, :8], 4, 8)
    return (low | fields(packed[:, 8:], 2, 4) << 4).to(torch.int8) - 32


def iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    """The eight scales of IQ4_XS: int8 [blocks, 8]."""
    return (fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << 4).to(torch.int8) - 32


def ue4m3(packed: torch.Tensor) -> torch.Tensor:
    """NVFP4's scales, half as large; 0 and the code of not-a-number are zero."""
    exponent, mantissa = (packed >> 3 & 15).float(), (packed & 7).float()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (1.0 + mantissa / 8.0) * torch.exp2(exponent - 7.0))
    return torch.where((packed == 0) | (packed == 0x7F), 0.0, value * 0.5)


def e8m0(packed: torch.Tensor) -> torch.Tensor:
    """MXFP4's scales, half as large: 2 ** (e - 128), by the bits of the float32 itself."""
    exponent = packed.int()
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32)


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    scales = halves(blocks, 0)
    return torch.where(flags(blocks[:, 2:]).bool(), scales, -scales)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks, 0) * (fields(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks, 0) * fields(blocks[:, 4:], 4, 16) + halves(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = fields(blocks[:, 6:], 4, 16) | flags(blocks[:, 2:6]) << 4
    return halves(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = fields(blocks[:, 8:], 4, 16) | flags(blocks[:, 4:8]) << 4
    return halves(blocks, 0) * codes + halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks, 0) * signed(blocks, 2, 34)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = fields(blocks[:, 16:80], 2, 32)
    minima = (halves(blocks, 82) * minima).repeat_interleave(16, dim=1)
    return scaled(halves(blocks, 80) * scales, codes) - minima


def q3_codes(blocks: torch.Tensor) -> torch.Tensor:
    """int8 [blocks, 256], from -4 to 3: bit i of the first 32 bytes belongs to the i-th 32 values."""
    high = flags(blocks[:, :32]).view(-1, 32, 8).transpose(1, 2).flatten(1)
    return (fields(blocks[:, 32:96], 2, 32) | high << 2).to(torch.int8) - 4


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    return scaled(halves(blocks, 108) * q3_scales(blocks[:, 96:108]), q3_codes(blocks))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, fields(blocks[:, 16:], 4, 32))


def q5_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Of Q5_K: bit i of the 32 bytes belongs to the i-th 32 values."""
    high = flags(blocks[:, 16:48]).view(-1, 32, 8).transpose(1, 2).flatten(1)
    return fields(blocks[:, 48:], 4, 32) | high << 4


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, q5_codes(blocks))


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    scales, minima = scales_and_mins(blocks[:, 4:16])
    minima = (halves(blocks, 2) * minima).repeat_interleave(32, dim=1)
    return scaled(halves(blocks, 0) * scales, codes) - minima


def q6_codes(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 256], from 0 to 63: they stand for -32 to 31."""
    return fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    return scaled(halves(blocks, 208) * signed(blocks, 192, 208), q6_codes(blocks).to(torch.int8) - 32)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks, 0) * _looked_up(IQ4_VALUES, fields(blocks[:, 2:], 4, 16))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    codes = _looked_up(IQ4_VALUES, fields(blocks[:, 8:], 4, 16))
    return scaled(halves(blocks, 0) * iq4_xs_scales(blocks), codes)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    return e8m0(blocks[:, :1]) * _looked_up(FP4_VALUES, fields(blocks[:, 1:], 4, 16))


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    return scaled(ue4m3(blocks[:, :4]), _looked_up(FP4_VALUES, fields(blocks[:, 4:], 4, 8)))


def tq1_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Of TQ1_0, from 0 to 2: five digits of base three in a byte, as a fraction; four in each of the last bytes."""

    def digits(packed: torch.Tensor, count: int) -> torch.Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8, device=packed.device)
        fractions = packed.unsqueeze(1) * powers.view(1, -1, 1)  # what exceeds a byte is dropped
        return (fractions.int() * 3 >> 8).to(torch.uint8).flatten(1)

    return torch.cat((digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)), dim=1)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks, 52) * (tq1_codes(blocks).float() - 1)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks, 64) * (fields(blocks[:, :64], 2, 32).float() - 1)


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
    packed = words(blocks, 2, 66, torch.int32)[:, 1::2]
    shifts = torch.arange(0, 28, 7, device=blocks.device)
    signs = _even_signs(packed.unsqueeze(-1) >> shifts & 127)
    return _book("IQ2_XXS", indexes) * signs, 2 * (packed >> 28) + 1, halves(blocks, 0) * 0.125


def _iq2_xs(blocks: torch.Tensor) -> Vectors:
    packed = words(blocks, 2, 66, torch.int16)
    values = _book("IQ2_XS", packed & 511) * _even_signs(packed >> 9)
    return values, 2 * fields(blocks[:, 66:74], 4, 1) + 1, halves(blocks, 0) * 0.125


def _iq2_s(blocks: torch.Tensor) -> Vectors:
    indexes = blocks[:, 2:34].long() | fields(blocks[:, 66:74], 2, 1).long() << 8
    values = _book("IQ2_S", indexes) * _signs(blocks[:, 34:66])
    return values, 2 * fields(blocks[:, 74:82], 4, 1) + 1, halves(blocks, 0) * 0.125


def _iq3_xxs(blocks: torch.Tensor) -> Vectors:
    packed = words(blocks, 66, 98, torch.int32)
    shifts = torch.arange(0, 28, 7, device=blocks.device)
    signs = _even_signs(packed.unsqueeze(-1) >> shifts & 127)
    values = _book("IQ3_XXS", blocks[:, 2:66].long()).view(-1, 8, 4, 8) * signs
    return values, 2 * (packed >> 28) + 1, halves(blocks, 0) * 0.25


def _iq3_s(blocks: torch.Tensor) -> Vectors:
    indexes = blocks[:, 2:66].long() | flags(blocks[:, 66:74]).long() << 8
    values = _book("IQ3_S", indexes).view(-1, 32, 8) * _signs(blocks[:, 74:106])
    return values, 2 * fields(blocks[:, 106:110], 4, 1) + 1, halves(blocks, 0)


def _iq1_s(blocks: torch.Tensor) -> Vectors:
    """For each 32 values four indexes of 11 bits, a scale of three bits, and which way all are moved by 1/8."""
    high = words(blocks, 34, 50, torch.int16)
    shifts = torch.arange(0, 12, 3, device=blocks.device)
    indexes = blocks[:, 2:34].reshape(-1, 8, 4).long() | (high.unsqueeze(-1) >> shifts & 7) << 8
    moved = torch.where(high >> 15 == 1, -0.125, 0.125)[:, :, None, None]
    return _book("IQ1_S", indexes) + moved, 2 * (high >> 12 & 7) + 1, halves(blocks, 0)


def _iq1_m(blocks: torch.Tensor) -> Vectors:
    """As IQ1_S, with a scale for each 16 values and a move for each 8. The block's own scale lies in spare bits."""
    packed = words(blocks, 48, 56, torch.int16)
    places = torch.arange(0, 16, 4, device=blocks.device)
    whole = ((packed >> 12) << places).sum(dim=1, keepdim=True).to(torch.int16).view(torch.float16).float()
    shifts = torch.arange(0, 12, 3, device=blocks.device)
    scales = 2 * (packed.unsqueeze(-1) >> shifts & 7).flatten(1) + 1
    high = fields(blocks[:, 32:48], 4, 1).long()
    values = _book("IQ1_S", blocks[:, :32].long() | (high & 7) << 8)
    return values + torch.where(high & 8 == 8, -0.125, 0.125).unsqueeze(-1), scales, whole


# Of the types with a codebook: values [blocks, ...], odd integers for each group of them, and a scale for each block.
VECTORS: dict[str, Callable[[torch.Tensor], Vectors]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def _of_vectors(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def unpack(blocks: torch.Tensor) -> torch.Tensor:
        values, scales, factors = VECTORS[name](blocks)
        return scaled(factors * scales, values.flatten(1))

    return unpack


_UNPACKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
    **{name: _of_vectors(name) for name in VECTORS},
}

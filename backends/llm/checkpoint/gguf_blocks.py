"""What the blocks of GGUF's quantized types say, exactly: small codes with scales and minima.

Each reader takes bytes, uint8 [blocks, bytes of a block]. A scale is multiplied with its sub-scale first, and then with
the small integers: that is the order that the type defines.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

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

# The codebooks of the IQ types: which combinations of values their indexes stand for.
#
# Each is a set of vectors in ascending order, the last value of a vector counting most. What is stored is which of all
# vectors are in the set, a bit for each.

# The values that a vector is made of, how many it has, and the compressed bits.
_CODEBOOKS: dict[str, tuple[tuple[int, ...], int, str]] = {
    "IQ2_XXS": (
        (8, 25, 43),
        8,
        "c-"
        "nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{"
        "KuzkVd4Mw`?l*l~*(z5~c8Qj-!-"
        "YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-"
        "@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7",
    ),
    "IQ2_XS": (
        (8, 25, 43),
        8,
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-"
        "fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>k"
        "C`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-"
        "pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC",
    ),
    "IQ2_S": (
        (8, 25, 43),
        8,
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-"
        "0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAkBEEtarKv-"
        "X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzR"
        "b24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-"
        "BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC"
        "*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6",
    ),
    "IQ3_XXS": (
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-"
        "c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-"
        "UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-"
        "9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5",
    ),
    "IQ3_S": (
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-"
        "rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-"
        "5G8(e|b5Y-"
        "VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge"
        "8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-"
        "wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8"
        "~6jd#wQ>",
    ),
    "IQ1_S": (
        (-1, 0, 1),
        8,
        "c-k#eK}(!R7=CxE;dM-"
        "9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9"
        "Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1"
        "yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-"
        "$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-"
        "WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_"
        "OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-"
        "6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-"
        "z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wc"
        "NC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-"
        ";P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-"
        "Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
    ),
}


@functools.cache
def codebook(name: str) -> torch.Tensor:
    """float32 [vectors, values of a vector]."""
    values, length, packed = _CODEBOOKS[name]
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8), bitorder="little")
    digits = np.flatnonzero(bits)[:, None] // len(values) ** np.arange(length) % len(values)
    return torch.from_numpy(np.array(values, np.float32)[digits])

"""Blocks of every quantized type, against the reader of the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from modelserver_backends.llm.checkpoint.gguf_blocks import plain_dtype, unpack_rows
from modelserver_backends.llm.checkpoint.gguf_types import BY_NAME, TENSOR_TYPES, TensorType

BLOCKS = [kind for kind in TENSOR_TYPES.values() if kind.is_quantized]
# The package lists this type and cannot read it.
READABLE = [kind for kind in BLOCKS if kind.name != "Q1_0"]


def random_rows(kind: TensorType, num_rows: int, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes are blocks; scales in float16 that are no numbers would be compared as such."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 256, (num_rows, num_blocks * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.number))
    is_finite = np.isfinite(values).reshape(num_rows * num_blocks, -1).all(axis=1)
    blocks = rows.reshape(-1, kind.block_bytes)
    return blocks[is_finite][: len(blocks) // 2].reshape(-1, kind.block_bytes)


def test_types_are_those_of_the_format() -> None:
    for kind in TENSOR_TYPES.values():
        assert gguf.GGMLQuantizationType[kind.name] == kind.number
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == (kind.block_len, kind.block_bytes)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_type_is_read_bit_for_bit(kind: TensorType) -> None:
    rows = random_rows(kind, 64, 16)
    assert len(rows) > 100
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.number))
    found = unpack_rows(kind, torch.from_numpy(rows)).numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_a_bit_is_a_sign() -> None:
    block = np.concatenate((np.array([1.5], np.float16).view(np.uint8), np.arange(16, dtype=np.uint8)))
    values = unpack_rows(BY_NAME["Q1_0"], torch.from_numpy(block[None])).numpy()[0]
    expected = np.where(np.unpackbits(block[2:], bitorder="little") == 1, 1.5, -1.5)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", ["Q4_K", "IQ3_S", "Q8_0"])
def test_many_rows_are_unpacked_as_few(name: str) -> None:
    """More than are unpacked at once, and in another precision."""
    kind = BY_NAME[name]
    rows = torch.from_numpy(random_rows(kind, 64, 2)).repeat(1024, 1).reshape(-1, 4 * kind.block_bytes)
    whole = unpack_rows(kind, rows, torch.bfloat16)
    assert whole.numel() > 1 << 20
    for row in (0, 777, rows.shape[0] - 1):
        assert torch.equal(whole[row], unpack_rows(kind, rows[row : row + 1])[0].bfloat16())


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_plain_types_are_views(name: str) -> None:
    kind = BY_NAME[name]
    dtype = plain_dtype(kind)
    assert dtype is not None
    values = torch.arange(-3, 5).to(dtype).view(2, 4)
    assert torch.equal(unpack_rows(kind, values.view(torch.uint8)), values)

"""EXL3 against its description, followed weight by weight."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.float_twins import assert_is_its_twin
from support.generations import loaded_engine
from support.quantized_checkpoints import Packed, change_tensors, write_quantized
from support.tiny_checkpoints import write_checkpoint

from modelserver.backend import InvalidArgumentError, UnsupportedError

pytestmark = pytest.mark.usefixtures("rows_in_floats")

UP = "model.layers.0.mlp.up_proj"
# All matrices have whole blocks of 128.
VALUES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
}
MCG, MUL1 = 0xCBAC1FED, 0x83DCD12D


def half(bits: int) -> np.float16:
    found: np.float16 = np.float16(struct.unpack("<e", struct.pack("<H", bits))[0])
    return found


@cache
def value(state: int, codebook: str) -> float:
    """As a GPU computes it, in half precision."""
    factor = {"": 89226354, "mcg": MCG, "mul1": MUL1}[codebook]
    word = state * factor + (64248484 if codebook == "" else 0) & 0xFFFFFFFF
    if codebook == "mul1":
        total = 0x6400 + sum(word.to_bytes(4, "little"))
        return float(np.float16(float(half(total)) * float(half(0x1EEE)) + float(half(0xC931))))
    word = word & 0x8FFF8FFF ^ 0x3B603B60
    return float(half(word & 0xFFFF) + half(word >> 16))


def hadamard(count: int) -> np.ndarray:
    """By the parity of the ones that two indices share."""
    index = np.arange(count)
    ones = np.array([int(one).bit_count() for one in range(count)])
    return np.where(ones[index[:, None] & index] % 2, -1.0, 1.0) / np.sqrt(count)


def tile(ring: str, bits: int, codebook: str) -> np.ndarray:
    """The 16 x 16 weights of a ring of bits: four threads hold 8 rows, two and two, eight of them 8 columns."""
    found = np.empty((16, 16))
    for lane in range(32):
        for at in range(8):
            end = len(ring) + (8 * lane + at + 1) * bits
            state = int((ring + ring)[end - 16 : end], 2)
            row = lane % 4 * 2 + at % 2 + 8 * (at % 4 // 2)
            found[row, lane // 4 + 8 * (at // 4)] = value(state, codebook)
    return found


def exl3(bits: int, codebook: str, *, has_factors: bool, seed: int = 0):
    drawn = np.random.default_rng(seed)

    def pack(weight: torch.Tensor) -> Packed:
        """Of any weight: random bits, and what they stand for."""
        outputs, inputs = weight.shape
        stored_outputs = outputs + -outputs % 128
        trellis = np.empty((inputs // 16, stored_outputs // 16, 16 * bits), np.uint16)
        rotated = np.empty((inputs, stored_outputs))
        for row in range(inputs // 16):
            for column in range(stored_outputs // 16):
                ring = "".join(map(str, drawn.integers(0, 2, 256 * bits).tolist()))
                halves = [int(ring[at : at + 16], 2) for at in range(0, len(ring), 16)]
                trellis[row, column] = [halves[at ^ 1] for at in range(len(halves))]
                rotated[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = tile(ring, bits, codebook)
        stored, signs = {"trellis": torch.from_numpy(trellis.view(np.int16))}, []
        for name, length in (("su", inputs), ("sv", stored_outputs)):
            drawn_signs = np.where(drawn.integers(0, 2, length), -1.0, 1.0)
            if has_factors:
                factors = (drawn_signs * drawn.uniform(0.05, 0.4, length)).astype(np.float16)
                stored[f"{name}h"] = torch.from_numpy(factors)
            else:
                factors = drawn_signs
                packed = np.packbits(drawn_signs < 0, bitorder="little").view(np.int16)
                stored[name] = torch.from_numpy(packed)
            signs.append(factors.astype(np.float64))
        if codebook:
            factor = MCG if codebook == "mcg" else MUL1
            stored[codebook] = torch.from_numpy(np.array([factor], np.uint32).view(np.int32))
        turned = hadamard(128)
        blocks = rotated.reshape(-1, 128, stored_outputs // 128, 128)
        whole = np.einsum("ij,ajbk,kl->aibl", turned, blocks, turned).reshape(inputs, stored_outputs)
        whole = (signs[0][:, None] * whole * signs[1])[:, :outputs]
        return stored, torch.from_numpy(whole.T).float().contiguous()

    return pack


@pytest.mark.parametrize(
    ("bits", "codebook", "has_factors"),
    [
        (2, "", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "mcg", True), (4, "mul1", False))),
    ],
)
def test_a_checkpoint_is_its_float_twin(bits: int, codebook: str, has_factors: bool, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    pack = exl3(bits, codebook, has_factors=has_factors)
    config = {"quant_method": "exl3", "bits": bits, "head_bits": bits}
    assert_is_its_twin(*write_quantized(source, tmp_path, pack, config, has_head=bits == 2))


def empty(weight: torch.Tensor) -> Packed:
    outputs, inputs = weight.shape
    factors = {"suh": torch.ones(inputs).half(), "svh": torch.ones(outputs).half()}
    return {"trellis": torch.zeros(inputs // 16, outputs // 16, 32, dtype=torch.int16), **factors}, weight


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"trellis": torch.zeros(8, 16, 24, dtype=torch.int16)}, UnsupportedError, r"trellis of 1\.5 bits"),
        ({"trellis": torch.zeros(8, 15, 32, dtype=torch.int16)}, InvalidArgumentError, r"have 8 x 16 tiles"),
        ({"suh": torch.ones(64, dtype=torch.float16)}, InvalidArgumentError, r"up_proj\.suh of shape \[64\]"),
        ({"svh": None}, InvalidArgumentError, r"no tensor layers\.0\.mlp\.up_proj\.sv"),
    ],
)
def test_what_is_wrong_is_named(changes, kind: type[Exception], message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    config = {"quant_method": "exl3"}
    packed, _ = write_quantized(source, tmp_path, empty, config)
    change_tensors(packed, {f"{UP}.{name}": tensor for name, tensor in changes.items()})
    with pytest.raises(kind, match=message), loaded_engine(packed):
        pass

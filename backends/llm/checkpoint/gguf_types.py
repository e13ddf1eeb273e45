"""The types of tensors in GGUF files: how many values a block has, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block_len` values along a row are stored together, in `block_bytes`. `is_quantized`: they share scales."""

    number: int
    name: str
    block_len: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_len > 1


TENSOR_TYPES = {
    kind.number: kind
    for kind in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(10, "Q2_K", 256, 84),
        TensorType(11, "Q3_K", 256, 110),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
        TensorType(16, "IQ2_XXS", 256, 66),
        TensorType(17, "IQ2_XS", 256, 74),
        TensorType(18, "IQ3_XXS", 256, 98),
        TensorType(19, "IQ1_S", 256, 50),
        TensorType(20, "IQ4_NL", 32, 18),
        TensorType(21, "IQ3_S", 256, 110),
        TensorType(22, "IQ2_S", 256, 82),
        TensorType(23, "IQ4_XS", 256, 136),
        TensorType(24, "I8", 1, 1),
        TensorType(25, "I16", 1, 2),
        TensorType(26, "I32", 1, 4),
        TensorType(27, "I64", 1, 8),
        TensorType(28, "F64", 1, 8),
        TensorType(29, "IQ1_M", 256, 56),
        TensorType(30, "BF16", 1, 2),
        TensorType(34, "TQ1_0", 256, 54),
        TensorType(35, "TQ2_0", 256, 66),
        TensorType(39, "MXFP4", 32, 17),
        TensorType(40, "NVFP4", 64, 36),
        TensorType(41, "Q1_0", 128, 18),
    )
}
# Mixtures of types, by their number in the metadata `general.file_type`.
FILE_TYPES: dict[int | None, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}
BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
# Numbers that files once had, or that no file has.
REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

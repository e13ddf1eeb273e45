"""Weights that stay in GGUF's blocks, against the floats that they stand for."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from modelserver_backends.llm.checkpoint import GgufCheckpoint, open_checkpoint
from modelserver_backends.llm.checkpoint.gguf_blocks import unpack_rows
from modelserver_backends.llm.checkpoint.gguf_types import BY_NAME, TENSOR_TYPES, TensorType
from modelserver_backends.llm.kernels import PACKED_KERNELS
from modelserver_backends.llm.quantization.gguf import Gguf, pack_blocks, quantized_weight
from modelserver_backends.llm.quantization.packing import pack
from modelserver_backends.llm.quantization.quantized_linear import QuantizedEmbedding
from safetensors.torch import load_file, save_file
from support.generations import generate, loaded_engine, random_prompts
from support.gguf_models import QuantizationType, write_gguf
from support.tiny_checkpoints import write_checkpoint

from modelserver.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("rows_in_floats")

BLOCKS = [kind for kind in TENSOR_TYPES.values() if kind.is_quantized]
# Where each type has its scales in float16.
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_M": (),
}


def drawn(kind: TensorType, num_rows: int, num_inputs: int, seed: int) -> np.ndarray[Any, Any]:
    """Rows of blocks with values of a usual size."""
    draw = np.random.default_rng(seed)
    shape = (num_rows, num_inputs // kind.block_len, kind.block_bytes)
    stored = draw.integers(0, 256, shape, dtype=np.uint8)
    ones = stored.copy()
    for at in SCALES.get(kind.name, (0,)):
        ones[..., at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        ones[..., 0] = 127
    elif kind.name == "NVFP4":
        ones[..., :4] = draw.integers(0x30, 0x40, (*shape[:2], 4), dtype=np.uint8)
    elif kind.name == "IQ1_M":
        ones[..., 49::2][..., :4] &= 15  # the block's scale lies in these bits
        ones[..., 55] |= 0x30
        ones[..., 53] |= 0xC0
    values = unpack_rows(kind, torch.from_numpy(ones.reshape(num_rows, -1)))
    scale = np.float16(1.4 * num_inputs**-0.5 / float(values.std()))
    for at in SCALES.get(kind.name, (0,)):
        ones[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        ones[..., 0] = 127 + round(float(np.log2(scale)))
    return ones.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_every_type_is_described_exactly(kind: TensorType) -> None:
    draw = np.random.default_rng(1)
    rows = torch.from_numpy(draw.integers(0, 256, (2000, 2 * kind.block_bytes), dtype=np.uint8))
    values = unpack_rows(kind, rows)
    rows = rows[values.isfinite().all(dim=1)]
    assert len(rows) > 100
    weight = quantized_weight(kind, rows)
    assert torch.equal(weight.dequantized(), unpack_rows(kind, rows))
    # As few bits as the file has, or a byte where the codes do not fit into half of one.
    assert weight.bits <= 4 or kind.name in ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


def test_a_large_matrix_is_described_in_parts() -> None:
    rows = torch.from_numpy(drawn(BY_NAME["Q4_K"], 10, 512, 0)).repeat(1000, 1)
    assert torch.equal(
        quantized_weight(BY_NAME["Q4_K"], rows).rows(slice(9990, None)).dequantized(),
        unpack_rows(BY_NAME["Q4_K"], rows[:10]),
    )


if PACKED_KERNELS is not None:
    PACKED = [kind for kind in BLOCKS if kind.number in PACKED_KERNELS.block_types()]

    @pytest.mark.parametrize("instructions", PACKED_KERNELS.instructions())
    @pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
    def test_blocks_are_packed_as_their_description(instructions: str, kind: TensorType) -> None:
        """In pieces that do not end where the kernels' blocks of outputs do."""
        draw = np.random.default_rng(0)
        rows = torch.from_numpy(draw.integers(0, 256, (45, 512 // kind.block_len * kind.block_bytes), dtype=np.uint8))
        PACKED_KERNELS.use(instructions)
        try:
            expected = pack(quantized_weight(kind, rows), PACKED_KERNELS)
            found = pack_blocks(kind, rows.split([5, 21, 1, 18]), PACKED_KERNELS, shape=(45, 512))
        finally:
            PACKED_KERNELS.use(PACKED_KERNELS.instructions()[0])
        assert expected is not None
        for field in dataclasses.fields(found):
            if field.name == "description":  # it has addresses
                continue
            own, its = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(own, torch.Tensor):
                assert own.dtype is its.dtype
                assert torch.equal(own.view(torch.uint8), its.view(torch.uint8)), field.name
            else:
                assert own == its, field.name

    def test_only_matrices_of_a_type_are_filled() -> None:
        kind, rows = BY_NAME["Q4_K"], torch.zeros(4, 144, dtype=torch.uint8)
        matrix = pack(quantized_weight(kind, rows), PACKED_KERNELS)
        assert matrix is not None
        for wrong in ((BY_NAME["Q4_1"].number, 0, 4), (1, 0, 4), (kind.number, 1, 4), (kind.number, -1, 1)):
            number, first, count = wrong
            with pytest.raises(ValueError, match="not one of these blocks"):
                PACKED_KERNELS.fill(matrix.description, number, first, rows.data_ptr(), count, 1)


class Twins:
    """A GGUF file whose matrices are of the types given, in turn, and a checkpoint of the floats they stand for."""

    def __init__(self, root: Path, family: str, names: Sequence[str], **values: Any) -> None:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, **values}
        source = write_checkpoint(root / "source", family, values=sizes)
        self.floats = root / "floats"
        self.floats.mkdir()
        kinds = itertools.cycle(BY_NAME[name] for name in names)
        written = root / "plain.gguf"
        write_gguf(source, written)
        self.path = root / "model.gguf"
        reader = gguf.GGUFReader(written)
        writer = gguf.GGUFWriter(self.path, reader.get_field("general.architecture").contents())
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                writer.add_key_value(
                    field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
                )
        for index, tensor in enumerate(reader.tensors):
            values_of = tensor.data
            if values_of.ndim == 1 or "ffn_gate_inp" in tensor.name:
                writer.add_tensor(tensor.name, values_of)
                continue
            kind = next(kinds)
            rows = drawn(kind, int(np.prod(values_of.shape[:-1])), values_of.shape[-1], index)
            shape = (*values_of.shape[:-1], rows.shape[-1])
            writer.add_tensor(tensor.name, rows.reshape(shape), raw_dtype=QuantizationType(kind.number))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self._write_floats(source)

    def _write_floats(self, source: Path) -> None:
        """By the names of the source, of what the file's weights stand for."""
        for path in source.iterdir():
            (self.floats / path.name).write_bytes(path.read_bytes())
        stored = load_file(source / "model.safetensors")
        with open_checkpoint(self.path) as checkpoint:
            inner = {name: name.removeprefix("model.").removeprefix("transformer.") for name in stored}
            floats = {name: checkpoint.tensor(inner[name]).float().contiguous() for name in stored}
        save_file(floats, self.floats / "model.safetensors", {"format": "pt"})


MIXED = ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "IQ4_XS", "Q3_K", "IQ2_XXS", "MXFP4", "Q2_K", "Q5_K", "Q4_1", "IQ3_S", "TQ2_0"]


@pytest.mark.parametrize(
    ("family", "names", "values"),
    [
        ("llama", ["Q4_K"], {}),
        ("llama", MIXED, {}),
        ("llama_tied_biased", ["Q6_K", "IQ4_NL", "NVFP4"], {}),
        ("phi3", ["Q5_1", "IQ3_XXS"], {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": None}),
        ("gemma2", ["Q8_0", "Q4_K"], {}),
        ("mixtral", ["Q4_K", "Q6_K", "IQ1_S"], {}),
        ("qwen3_moe", ["Q4_0", "IQ2_S"], {"moe_intermediate_size": 256}),
        ("deepseek_v2", ["Q8_0", "Q4_0"], {"kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}),
    ],
    ids=str,
)
def test_packed_weights_compute_as_their_floats(
    tmp_path: Path, family: str, names: Sequence[str], values: dict[str, Any]
) -> None:
    twins = Twins(tmp_path, family, names, **values)
    with open_checkpoint(twins.path) as checkpoint:
        assert set(checkpoint.config["quantization_config"]["types"].values()) == set(names)
    prompts = random_prompts(3, longest=30)
    results = []
    for place in (twins.floats, twins.path):
        with loaded_engine(place) as engine:
            results.append(generate(engine, prompts, 5))
    (floats, packed) = results
    assert [tokens for tokens, _ in packed] == [tokens for tokens, _ in floats]
    for (_, found), (_, expected) in zip(packed, floats, strict=True):
        assert found == pytest.approx(expected, abs=2e-3)


def test_gpt2_has_its_matrices_the_other_way_round(tmp_path: Path) -> None:
    twins = Twins(
        tmp_path, "gpt2", ["Q4_K", "Q8_0"], n_embd=256, hidden_size=None, intermediate_size=None, head_dim=None
    )
    prompts = random_prompts(3, longest=30)
    results = []
    for place in (twins.floats, twins.path):
        with loaded_engine(place) as engine:
            results.append([tokens for tokens, _ in generate(engine, prompts, 5)])
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_a_tied_head_is_the_embeddings_own_matrix(name: str) -> None:
    kind = BY_NAME[name]
    stored = torch.from_numpy(drawn(kind, 20, 256, 0))
    embedding, values = QuantizedEmbedding(quantized_weight(kind, stored), torch.float32), unpack_rows(kind, stored)
    assert torch.equal(embedding(torch.tensor([3, 7])), values[[3, 7]])
    rows = torch.randn(4, 256)
    assert torch.equal(embedding.head()(rows, None), rows @ values.T)


@pytest.mark.slow
def test_ranks_share_blocks(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "llama", ["Q8_0", "Q4_K", "Q4_0"])
    prompts = random_prompts(2, longest=30)
    results = []
    for size in (1, 2):
        with loaded_engine(twins.path, tensor_parallel_size=size) as engine:
            results.append([tokens for tokens, _ in generate(engine, prompts, 5)])
    assert results[0] == results[1]


@pytest.mark.slow
def test_blocks_that_ranks_cannot_share(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "llama", ["Q4_K"], intermediate_size=768)
    with (
        pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.down_proj: inputs 0 to 384 cut what 8 groups share"),
        loaded_engine(twins.path, tensor_parallel_size=2),
    ):
        pass


def test_other_quantizations_are_refused(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "llama", ["Q4_K"])
    with (
        pytest.raises(UnsupportedError, match="but the checkpoint's weights are 'gguf'"),
        loaded_engine(twins.path, quantization="int8"),
    ):
        pass
    with loaded_engine(twins.path, quantization="gguf"):
        pass
    entries = json.loads((twins.floats / "config.json").read_text())
    (twins.floats / "config.json").write_text(json.dumps({**entries, "quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(UnsupportedError, match="is read from GGUF files alone"), loaded_engine(twins.floats):
        pass
    with pytest.raises(UnsupportedError, match="plain weights are not made into it"):
        Gguf.from_config(None)


def test_blocks_and_floats_have_names(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "llama", ["Q4_K"])
    with GgufCheckpoint(twins.path) as checkpoint:
        assert "layers.0.mlp.up_proj.blocks" in checkpoint
        assert "layers.0.input_layernorm.blocks" not in checkpoint
        assert checkpoint.shape("layers.0.mlp.up_proj.blocks") == (512, 144)
        assert checkpoint.tensor("layers.0.mlp.up_proj.blocks").dtype is torch.uint8
        assert checkpoint.shape("layers.0.mlp.up_proj.weight") == (512, 256)
        assert checkpoint.tensor("layers.0.mlp.up_proj.weight").dtype is torch.float32

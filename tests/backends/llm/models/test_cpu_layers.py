"""All layers in one call of the kernels give what layers give one by one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.kernels import KERNELS, PACKED_KERNELS
from modelserver_backends.llm.models.cpu_layers import JoinedLayers
from modelserver_backends.llm.step_context import StepContext
from support.generations import generate, loaded_adapters, loaded_engine, random_prompts
from support.tiny_adapters import write_adapter
from support.tiny_checkpoints import write_checkpoint

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "quantization"), [("llama", "int8"), ("qwen2", "int4"), ("qwen3", "int8"), ("gemma2", "int8")]
)
def test_layers_joined_are_layers_one_by_one(
    name: str, quantization: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, norms of heads, windows, and several rotations; a layer that the kernels do not know joins none."""
    compute, joined_steps = JoinedLayers.compute, []

    def counted(layers: JoinedLayers, hidden: torch.Tensor, step: StepContext) -> bool:
        joined_steps.append(compute(layers, hidden, step))
        return joined_steps[-1]

    def never(layers: JoinedLayers, hidden: torch.Tensor, step: StepContext) -> bool:
        return False

    found = []
    for replacement in (counted, never):
        monkeypatch.setattr(JoinedLayers, "compute", replacement)
        with loaded_engine(checkpoint(name), quantization=quantization, block_size=8, dtype="float32") as engine:
            found.append(generate(engine, random_prompts(5), 8))
    assert found[0] == found[1]
    can_join = KERNELS is not None and PACKED_KERNELS is not None and name != "gemma2"
    assert any(joined_steps) is can_join


def test_steps_without_adapters_are_joined_where_adapters_are_served(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, joined_steps = JoinedLayers.compute, []

    def counted(layers: JoinedLayers, hidden: torch.Tensor, step: StepContext) -> bool:
        joined_steps.append(compute(layers, hidden, step))
        return joined_steps[-1]

    monkeypatch.setattr(JoinedLayers, "compute", counted)
    found = []
    for serves in (False, True):
        with loaded_engine(checkpoint("llama"), quantization="int8", dtype="float32", enable_lora=serves) as engine:
            found.append(generate(engine, random_prompts(3), 6))
    assert found[0] == found[1]
    can_join = KERNELS is not None and PACKED_KERNELS is not None
    assert [any(joined_steps), all(joined_steps)] == [can_join, can_join]


def test_steps_with_adapters_are_joined(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What adapters of several ranks add is the same, to the bit; DoRA's, which scale, take the layers one by one."""
    base, compute, joined_steps = checkpoint("llama"), JoinedLayers.compute, []
    places = {"a": write_adapter(base, tmp_path / "a"), "b": write_adapter(base, tmp_path / "b", seed=1, r=2)}
    places["part"] = write_adapter(base, tmp_path / "part", seed=2, target_modules=["v_proj", "down_proj"])
    dora = write_adapter(base, tmp_path / "dora", seed=3, use_dora=True)

    def counted(layers: JoinedLayers, hidden: torch.Tensor, step: StepContext) -> bool:
        joined_steps.append(compute(layers, hidden, step))
        return joined_steps[-1]

    def never(layers: JoinedLayers, hidden: torch.Tensor, step: StepContext) -> bool:
        return False

    found = []
    for replacement in (counted, never):
        monkeypatch.setattr(JoinedLayers, "compute", replacement)
        with loaded_adapters(base, {**places, "dora": dora}, quantization="int8", dtype="float32") as engine:
            found.append(generate(engine, random_prompts(6), 8, adapter=["a", "b", "part", "a", None, "b"]))
            if replacement is counted:
                assert all(joined_steps) is (KERNELS is not None and PACKED_KERNELS is not None)
            found.append(generate(engine, random_prompts(2), 4, adapter=["dora", "a"]))
    assert found[:2] == found[2:]
    assert not joined_steps[-1]


def test_threads_share_all_layers_to_the_bit(tmp_path: Path) -> None:
    """Products of this width are shared; more threads than processors take turns to be behind."""
    wide = {"hidden_size": 256, "intermediate_size": 512}
    place = write_checkpoint(tmp_path / "wide", "qwen3", values=wide)
    found = []
    for num_threads in (1, 2, 5, 20):
        with loaded_engine(place, quantization="int8", num_threads=num_threads) as engine:
            found.append(generate(engine, random_prompts(4), 8))
    assert found == [found[0]] * 4


def test_a_long_prompt_has_the_same_bits_in_any_chunks(checkpoint: Checkpoints) -> None:
    found = []
    for tokens in (128, 16):
        with loaded_engine(
            checkpoint("qwen3"), quantization="int8", max_num_seqs=4, max_num_batched_tokens=tokens
        ) as engine:
            found.append(generate(engine, [list(range(3, 90))], 4)[0])
    assert found[0] == found[1]

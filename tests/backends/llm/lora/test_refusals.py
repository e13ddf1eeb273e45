"""Adapters that are not served say why, and what to do; slots are given in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm.lora.adapter import Adapter, LowRank, Target
from modelserver_backends.llm.lora.peft_files import read_peft
from modelserver_backends.llm.lora.places import find_adapters
from modelserver_backends.llm.lora.slots import AdapterSlots
from modelserver_backends.llm.models.linear_tensors import Part
from safetensors.torch import save_file

from modelserver.backend import ConfigError, NotFoundError, ServerError

MODULE = "layers.0.self_attn.q_proj"
TENSORS = {
    f"base_model.model.model.{MODULE}.lora_A.weight": torch.ones(2, 8),
    f"base_model.model.model.{MODULE}.lora_B.weight": torch.ones(4, 2),
}


def no_weight(_part: Part) -> torch.Tensor:
    raise AssertionError("no adapter here needs it")


TARGET = Target(
    modules={MODULE: Part(MODULE, 8, (4,))}, max_rank=4, num_heads=2, num_kv_heads=2, kind="llama", weight=no_weight
)


def write(place: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    save_file(TENSORS if tensors is None else tensors, place / "adapter_model.safetensors")
    return place


def test_scales_are_folded_in_and_digests_are_of_contents(tmp_path: Path) -> None:
    first = read_peft("a", write(tmp_path / "a", {"lora_alpha": 6}), TARGET)
    assert torch.equal(first.modules[MODULE].up, torch.full((4, 2), 3.0))
    assert read_peft("b", write(tmp_path / "b", {"lora_alpha": 6}), TARGET).digest == first.digest
    assert read_peft("c", write(tmp_path / "c", {"lora_alpha": 7}), TARGET).digest != first.digest


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3': only LORA is served"),
        ({"bias": "all"}, "bias 'all': biases that were trained are not applied"),
        ({"modules_to_save": ["lm_head"]}, "merge the adapter"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's own weights"),
        ({"alora_invocation_tokens": [1]}, "adapters are applied to all tokens"),
        ({"target_parameters": ["experts"]}, "experts are not adapted"),
        ({"lora_alpha": "much"}, "lora_alpha of model.layers.0.self_attn.q_proj must be a number"),
        ({"use_dora": True}, "has use_dora and no .lora_magnitude_vector"),
    ],
)
def test_configs(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerError) as caught:
        read_peft("mine", write(tmp_path / "a", config), TARGET)
    assert message in caught.value.message
    assert "'mine'" in caught.value.message


def named(module: str, down: tuple[int, int] = (2, 8), up: tuple[int, int] = (4, 2)) -> dict[str, torch.Tensor]:
    prefix = f"base_model.model.model.{module}"
    return {f"{prefix}.lora_A.weight": torch.ones(down), f"{prefix}.lora_B.weight": torch.ones(up)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (named("embed_tokens"), "changes the module embed_tokens, and adapters are applied to linear layers of"),
        (named(MODULE, up=(6, 2)), "which takes 8 values and gives 4: it was trained for another model"),
        (named(MODULE, (5, 8), (4, 5)), "has rank 5 for the module"),
        ({"base_model.model.model.norm.weight": torch.ones(8)}, "only .lora_A.weight and .lora_B.weight of linear"),
        (dict(list(TENSORS.items())[:1]), "no matrix .lora_B.weight beside it"),
        ({}, "changes no module"),
    ],
)
def test_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ServerError) as caught:
        read_peft("mine", write(tmp_path / "a", {}, tensors), TARGET)
    assert message in caught.value.message


def test_files(tmp_path: Path) -> None:
    place = write(tmp_path / "a", {})
    (place / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(ServerError, match="is not a whole safetensors file"):
        read_peft("mine", place, TARGET)
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
    with pytest.raises(NotFoundError, match=r"adapter_model\.bin, which may run code"):
        read_peft("mine", place, TARGET)


def test_places(tmp_path: Path) -> None:
    version, elsewhere = tmp_path / "1", write(tmp_path / "elsewhere", {})
    version.mkdir()
    write(version / "beside", {})
    (version / "multi_lora.json").write_text(json.dumps({"far": str(elsewhere)}))
    found = find_adapters("m", version, {"near": "beside"}, is_confined=False)
    assert found == {"near": version / "beside", "far": elsewhere, "beside": version / "beside"}
    with pytest.raises(ConfigError, match="the adapter 'far' lies outside"):
        find_adapters("m", version, {}, is_confined=True)
    with pytest.raises(ConfigError, match="there are two adapters called 'far'"):
        find_adapters("m", version, {"far": "beside"}, is_confined=False)
    with pytest.raises(NotFoundError, match="the adapter 'none': there is neither a file"):
        find_adapters("m", version, {"none": "nowhere"}, is_confined=False)


def test_the_longest_unused_slot_is_given_away() -> None:
    adapters = [Adapter(name, b"", {"m": LowRank(torch.ones(1, 1), torch.ones(1, 1))}) for name in "abc"]
    slots = AdapterSlots(2)
    held = [slots.acquire(adapters[0]), slots.acquire(adapters[1]), slots.acquire(adapters[0])]
    assert held[0] == held[2] != held[1]
    assert not slots.can_acquire(adapters[2])
    assert slots.running == {"a": 2, "b": 1}
    slots.release(held[0])
    assert not slots.can_acquire(adapters[2])
    slots.release(held[2])
    slots.release(held[1])
    assert slots.acquire(adapters[1]) == held[1]
    assert slots.acquire(adapters[2]) == held[0]
    assert slots.running == {"b": 1, "c": 1}

"""What steps take of a device's memory is found out at load, and the KV cache gets what they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm import kv_memory
from modelserver_backends.llm.attention.kv_blocks import KvBlocks
from modelserver_backends.llm.attention.paged import AttentionBatch, DeviceInputs, copied_together
from modelserver_backends.llm.block_tables import DeviceTables
from modelserver_backends.llm.captured_decode import SAMPLED_ENDINGS, CapturedDecode
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.cuda_graphs import Captured
from modelserver_backends.llm.embedding.head import load_head
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.kv_memory import DeviceMemory, reserve_kv_memory
from modelserver_backends.llm.models.load import LoadedNetwork
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.profile import drafting_bytes, picture_bytes
from modelserver_backends.llm.runner import Runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.speculation.config import SpeculativeConfig
from PIL import Image
from support.checkpoints import network_of
from support.tiny_pictures import write_picture_checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Checkpoints = Callable[[str], Path]
GIB = 1 << 30
OPTIONS = EngineOptions(
    device="cpu", dtype="float32", max_model_len=64, max_num_seqs=6, max_num_batched_tokens=48, block_size=8
)


class Counters(TorchDispatchMode):
    """A device's: the bytes of all storages that are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[StorageWeakRef, int] = {}
        self._most = self._began = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if StorageWeakRef(storage) not in given:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._most = max(self._most, self.used())
        return result

    def used(self) -> int:
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        return sum(self._alive.values())

    def begin(self) -> None:
        self._most = self._began = self.used()

    def peak(self) -> int:
        return self._most - self._began


class PlainAttention:
    """Takes memory as our kernels do: queries that are turned, and its result."""

    def prepare(self, batch: AttentionBatch) -> DeviceInputs:
        slots, lens, tables = copied_together([batch.slots, batch.lens, batch.block_tables], torch.device("cpu"))
        return DeviceInputs(batch.num_decodes, slots, lens, tables.view(batch.block_tables.shape))

    def rope_and_attend(self, _layer: int, heads: torch.Tensor, _rotation: Any, _inputs: Any) -> torch.Tensor:
        turned = heads[:, :4].clone()
        return torch.zeros_like(turned).flatten(1)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def runner_of(loaded: LoadedNetwork, directory: Path, num_blocks: int, captured: CapturedDecode | None) -> Runner:
    blocks = KvBlocks(loaded.kv_layout, num_blocks=num_blocks, block_size=8, device=loaded.device)
    return Runner(
        loaded,
        sampler=Sampler(),
        head=load_head(open_checkpoint(directory), OPTIONS, default="last", device=loaded.device),
        blocks=blocks,
        attention=PlainAttention(),
        captured=captured,
        is_asynchronous=True,
    )


def test_no_step_takes_more_than_the_profile_says(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    loaded = network_of(directory, OPTIONS)
    params = SamplingParams(temperature=1.0, top_p=0.8, top_k=20, logprobs=20, prompt_logprobs=20, max_tokens=8)
    with Counters() as memory:
        few = replace(OPTIONS, max_num_batched_tokens=8)
        small = runner_of(loaded, directory, 2, None).measure_memory(few, memory)
        found = runner_of(loaded, directory, 2, None).measure_memory(OPTIONS, memory)
        # Logits of 42 tokens of the longest prompt.
        assert found.step > 42 * 4 * loaded.vocab_size
        assert found.step > 2 * small.step
        assert found.graphs == 0
        engine = Engine(options=OPTIONS, runner=runner_of(loaded, directory, 49, None), tokenizer=None)
        memory.begin()
        for length in (40, 3, 30, 2, 9, 40):
            engine.add(GenerationRequest(list(range(1, 1 + length)), params))
        while engine.has_work:
            engine.step()
        assert memory.peak() <= found.step


def test_graphs_are_counted_by_the_largest_and_one_more(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    loaded = network_of(directory, OPTIONS)
    used = 0
    captured_sizes: list[int] = []

    def capture(compute: Callable[[], torch.Tensor]) -> Captured:
        nonlocal used
        output = compute()
        captured_sizes.append(len(output))
        used += 1000 if len(output) == 8 else 30
        return Captured(output, lambda: None)

    captured = CapturedDecode(
        loaded.network,
        PlainAttention(),
        device=loaded.device,
        max_num_seqs=8,
        tables=DeviceTables(8, 8, loaded.device),
        capture=capture,
    )
    with Counters() as memory:
        memory.used = lambda: used  # type: ignore[method-assign]
        found = runner_of(loaded, directory, 2, captured).measure_memory(OPTIONS, memory)
    # Sizes 8, 4, 2 and 1, of which all but the first share its memory.
    assert found.graphs == len(SAMPLED_ENDINGS) * (1000 + 3 * 30)
    assert captured_sizes == [8] * len(SAMPLED_ENDINGS) + [4]


def test_the_kv_cache_gets_what_steps_leave(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = network_of(checkpoint("llama"), OPTIONS)
    monkeypatch.setattr(kv_memory, "available_bytes", lambda *_: 100_000)
    monkeypatch.setattr(kv_memory, "device_memory", lambda _: DeviceMemory(is_lazy=False))
    memory = reserve_kv_memory(
        loaded.kv_layout, OPTIONS, max_model_len=64, device=loaded.device, what="it", step_bytes=30_000
    )
    assert memory.blocks.num_blocks == 70_000 // loaded.kv_layout.block_bytes(8)


@pytest.mark.parametrize(("given", "expected"), [({"most_share": 0.5}, 50_000), ({"others_left": 60_000}, 60_000)])
def test_the_kv_cache_leaves_room_for_other_models_and_fits_into_every_rank(
    given: dict[str, Any], expected: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = network_of(checkpoint("llama"), OPTIONS)
    monkeypatch.setattr(kv_memory, "available_bytes", lambda *_: 100_000)
    monkeypatch.setattr(kv_memory, "device_memory", lambda _: DeviceMemory(is_lazy=False))
    memory = reserve_kv_memory(loaded.kv_layout, OPTIONS, max_model_len=64, device=loaded.device, what="it", **given)
    assert memory.blocks.num_blocks == expected // loaded.kv_layout.block_bytes(8)


def test_a_trained_layer_that_guesses_has_room(checkpoint: Checkpoints, tmp_path: Path) -> None:
    loaded = network_of(checkpoint("llama"), OPTIONS)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    layer = loaded.kv_layout.block_bytes(1) // len(loaded.kv_layout.group.layers)
    memory_of_texts = 2 * layer * 64 * OPTIONS.max_num_seqs
    for config, expected in (
        (None, 0),
        (SpeculativeConfig(method="ngram", num_speculative_tokens=4), 0),
        (SpeculativeConfig(method="mtp", num_speculative_tokens=1), memory_of_texts),
        (SpeculativeConfig(method="eagle3", num_speculative_tokens=4, model=str(tmp_path)), 1000 + memory_of_texts),
    ):
        options = replace(OPTIONS, speculative_config=config)
        assert drafting_bytes(loaded.kv_layout, options, 64) == expected


def test_the_largest_picture_has_room(tmp_path: Path) -> None:
    options = replace(OPTIONS, max_image_pixels=1 << 14, mm_processor_cache_gb=0.0)
    tower = network_of(write_picture_checkpoint(tmp_path, "llava"), options).tower
    assert tower is not None
    with Counters() as memory:
        found = picture_bytes(tower, options, memory)
        memory.begin()
        tower.compute(Image.new("RGB", (300, 200)), {})
        assert 0 < memory.peak() <= found
    assert picture_bytes(tower, replace(options, mm_processor_cache_gb=1.0), memory) >= GIB


@pytest.mark.parametrize(
    ("memory_bytes", "given", "expected"),
    [
        (24 * GIB, {}, (256, 2048)),
        (80 * GIB, {}, (1024, 8192)),
        (180 * GIB, {}, (1024, 16384)),
        (80 * GIB, {"max_num_seqs": 64}, (64, 8192)),
        (24 * GIB, {"max_num_seqs": 2048}, (2048, 2048)),
        (80 * GIB, {"max_num_batched_tokens": 512}, (512, 512)),
        (80 * GIB, {"max_num_seqs": 16, "max_num_batched_tokens": 256}, (16, 256)),
    ],
)
def test_sizes_that_were_not_given_are_the_devices(
    memory_bytes: int, given: dict[str, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, memory_bytes))
    options = EngineOptions.from_parameters({"block_size": 16, **given})
    on_gpu = kv_memory.sized_for(options, torch.device("cuda:0"))
    assert (on_gpu.max_num_seqs, on_gpu.max_num_batched_tokens) == expected
    assert kv_memory.sized_for(options, torch.device("cpu")) is options

"""Steps with prompts in graphs: the same tokens as without, by few launches, on a device that records and replays."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm import cuda_graphs, kernels
from modelserver_backends.llm import runner as runner_module
from modelserver_backends.llm.attention import choose
from modelserver_backends.llm.attention.sdpa import SdpaAttention
from modelserver_backends.llm.captured_pieces import token_sizes
from modelserver_backends.llm.plan import Chunk, StepPlan
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import Sequence
from support.generations import generate, loaded_adapters, loaded_engine, random_prompts
from support.recorded_graphs import Device, RecordedGraphs
from support.tiny_adapters import write_adapter
from support.tiny_checkpoints import write_checkpoint
from support.torch_adapters import use_torch_adapters
from support.torch_attention import TorchAttention

Checkpoints = Callable[[str], Path]
OPTIONS = {"attention_backend": "sdpa", "max_num_batched_tokens": 24, "max_num_seqs": 4}
PROMPTS = random_prompts(6, longest=40, seed=3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    # All is computed by torch's operations, which are recorded.
    monkeypatch.setattr(kernels, "KERNELS", None)
    monkeypatch.setattr(kernels, "PACKED_KERNELS", None)
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(runner_module, "CudaGraphs", lambda: RecordedGraphs(device))
    return device


def check_same(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    """Rows of padding change sums in their last bits."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "values"),
    [("qwen3", {}), ("gemma3", {}), ("deepseek_v3", {"first_k_dense_replace": 4})],
    ids=["qwen3", "gemma3", "latent"],
)
def test_text_is_the_same_in_pieces(family: str, values: dict[str, Any], device: Device, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, family, values=values)
    with loaded_engine(directory, **OPTIONS, enforce_eager=True) as engine:
        expected = generate(engine, PROMPTS, 5)
    assert not device.graphs
    with device, loaded_engine(directory, **OPTIONS) as engine:
        num_graphs = len(device.graphs)
        check_same(generate(engine, PROMPTS, 5), expected)
    # Of 24 tokens, 16, 8, 4, 2 and 1: before and after the attention of each layer.
    assert num_graphs == len(device.graphs) == 6 * (engine.runner.network.config.num_layers + 1)


def test_adapters_of_unlike_ranks_are_in_pieces(
    checkpoint: Checkpoints, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside decodes, in steps of both kinds of tiles; rows without adapters have graphs of their own."""
    base = checkpoint("llama")
    places = {f"a{rank}": write_adapter(base, tmp_path / str(rank), seed=rank, r=rank) for rank in (2, 7)}
    names = ["a2", None, "a7", "a2", "a7", None]
    options = {**OPTIONS, "max_num_batched_tokens": 100}
    with loaded_adapters(base, places, **options, enforce_eager=True) as engine:
        expected = generate(engine, PROMPTS, 5, adapter=names)
    monkeypatch.setitem(sys.modules, "modelserver_backends.llm.lora.triton_lora", None)
    use_torch_adapters(monkeypatch.setattr)
    with device, loaded_adapters(base, places, **options) as engine:
        num_graphs, num_layers = len(device.graphs), engine.runner.network.config.num_layers
        assert num_graphs == 2 * len(token_sizes(100)) * (num_layers + 1)
        check_same(generate(engine, PROMPTS, 5, adapter=names), expected)
        device.num_replays, began = 0, engine.statistics.num_steps
        check_same(generate(engine, PROMPTS[2:3], 5, adapter="a7"), expected[2:3])
        assert device.num_replays == (engine.statistics.num_steps - began) * (num_layers + 1)
    assert len(device.graphs) == num_graphs


def test_a_capture_that_fails_leaves_steps_without_graphs(
    checkpoint: Checkpoints, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded_engine(checkpoint("qwen3"), **OPTIONS, enforce_eager=True) as engine:
        expected = generate(engine, PROMPTS, 5)
    device.refuses = True
    with device, loaded_engine(checkpoint("qwen3"), **OPTIONS) as engine:
        check_same(generate(engine, PROMPTS, 5), expected)
    assert device.num_replays == 0
    assert caplog.text.count("without CUDA graphs: operation not permitted") == 1


class OneLaunch(SdpaAttention):
    """As our kernels on a GPU are given heads and the place of the result, each layer by one launch."""

    fuses_norm = True

    def rope_and_attend(
        self, _layer: int, heads: torch.Tensor, _rotation: Any, _inputs: Any, _norm: Any = None, output: Any = None
    ) -> torch.Tensor:
        if output is None:
            output = heads.new_empty(len(heads), 4 * heads.shape[2])
        return output.zero_()


def test_a_mixed_step_is_launched_by_a_graph_and_attention_per_layer(
    checkpoint: Checkpoints, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "SdpaAttention", OneLaunch)
    counts = []
    for is_eager in (True, False):
        with device, loaded_engine(checkpoint("qwen3"), **OPTIONS, enforce_eager=is_eager) as engine:
            greedy = SamplingParams(temperature=0.0)
            decoding = Sequence(1, list(range(9, 20)), 10, greedy, slot=0, block_ids=array("q", [1, 2]))
            prompt = Sequence(2, list(range(9, 20)), 11, greedy, slot=1, block_ids=array("q", [3, 4]))
            device.num_launches = device.num_replays = 0
            engine.runner.launch(StepPlan((Chunk(decoding, 10, 1, 1), Chunk(prompt, 0, 11, 1)))).result()
            counts.append((device.num_launches, device.num_replays))
    num_layers = engine.runner.network.config.num_layers
    (eager, no_replays), (others, replays) = counts
    assert no_replays == 0
    assert replays == num_layers + 1
    # Attention of each layer; besides, what is before and after the network.
    assert others <= num_layers + 6
    assert eager > 12 * num_layers


def test_states_between_layers_are_taken_from_graphs(checkpoint: Checkpoints, device: Device) -> None:
    """As a trained layer that guesses reads them; those of one step are not changed by the next."""
    taken: dict[bool, list[torch.Tensor]] = {}
    for is_eager in (True, False):
        with device, loaded_engine(checkpoint("qwen3"), **OPTIONS, enforce_eager=is_eager) as engine:
            found = taken[is_eager] = []
            num_layers = engine.runner.network.config.num_layers
            engine.runner.tap([0, 1, num_layers], lambda *step: found.append(step[-1]))  # noqa: B023
            sequence = Sequence(1, list(range(9, 20)), 11, SamplingParams(temperature=0.0), block_ids=array("q", [1]))
            device.num_replays = 0
            for start, count in ((0, 7), (7, 4)):
                engine.runner.launch(StepPlan((Chunk(sequence, start, count, int(start > 0)),))).result()
    assert device.num_replays == 2 * (num_layers + 1)
    for eager, captured in zip(taken[True], taken[False], strict=True):
        np.testing.assert_allclose(captured, eager, atol=1e-5)


# Graphs of all endings.
WAYS = [{"logprobs": None}, {"logprobs": 0}, {"logprobs": None, "temperature": 0.8, "top_k": 5, "seed": 7}]


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "logits", "drawn"])
def test_decodes_in_graphs_send_the_blocks_that_are_new(
    params: dict[str, Any], checkpoint: Checkpoints, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than slots, too few blocks for those that run, and steps launched ahead."""
    monkeypatch.setattr(runner_module, "make_attention", lambda _name, blocks, spec: TorchAttention(blocks, spec))
    options = {**OPTIONS, "block_size": 8, "num_gpu_blocks_override": 20}
    with loaded_engine(checkpoint("qwen3"), **options, enforce_eager=True) as engine:
        expected = generate(engine, PROMPTS, 30, **params)
        assert engine.statistics.num_preemptions
    with device, loaded_engine(checkpoint("qwen3"), **options) as engine:
        device.num_replays = device.num_launches = 0
        check_same(generate(engine, PROMPTS, 30, **params), expected)
        assert engine.statistics.num_preemptions
    assert device.num_replays

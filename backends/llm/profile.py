"""How much of a GPU's memory steps take beside weights and the KV cache, found out by computing the largest ones.

A trial runner, whose KV cache has one block that all sequences share, computes a step of `max_num_batched_tokens` with
as many sequences as there can be, all of which are sampled in the dearest way, then log-probabilities of a prompt, and
captures the largest graphs. A tower sees the largest picture, beside all this.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from .options import EngineOptions
from .plan import Chunk, StepPlan
from .sampling_params import SamplingParams
from .sequence import Sequence

if TYPE_CHECKING:
    from .attention.kv_blocks import KvLayout
    from .pictures.tower import Tower

_MOST_PIXELS = 1 << 24
# Tokens of a sequence that gets drafts, for which there is memory of a layer that guesses: if all are longer, their
# keys and values take what is free.
_USUAL_DRAFTED = 8192


class Memory(Protocol):
    """The counters of a device, in bytes."""

    def used(self) -> int:
        """In use by all processes, without what only torch keeps for itself."""
        ...

    def begin(self) -> None:
        """Count a peak from now on."""
        ...

    def peak(self) -> int:
        """The most that torch has taken beyond what it had at `begin`, with what it keeps."""
        ...


class CudaMemory:
    """Of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = 0

    def used(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._began = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - self._began


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of the largest step, and of the graphs of all sizes."""

    step: int
    graphs: int


def picture_bytes(tower: Tower, options: EngineOptions, memory: Memory) -> int:
    """What seeing a picture takes, and the pictures that are kept. It is large enough for every image processor to make
    it smaller."""
    from PIL import Image

    side = math.isqrt(min(options.max_image_pixels, _MOST_PIXELS))
    memory.begin()
    tower.compute(Image.new("RGB", (side, side)), {})
    return memory.peak() + int(options.mm_processor_cache_gb * (1 << 30))


def drafting_bytes(layout: KvLayout, options: EngineOptions, max_model_len: int) -> int:
    """What a trained layer that guesses (`speculation.trained`) takes beside the network.

    Weights of a file of its own, and keys and values, which lie outside the KV cache, of as many sequences as get
    drafts.
    """
    config = options.speculative_config
    if config is None or not options.has_trained_drafts:
        return 0
    num_bytes = 0
    if config.model is not None:
        num_bytes = sum(each.stat().st_size for each in Path(config.model).expanduser().glob("*.safetensors"))
    group = layout.group
    per_token = 2 * group.block_bytes(1) // len(group.layers)  # its memory grows by doubling
    sequences = min(options.max_num_seqs, config.most_sequences(is_gpu=True))
    tokens = sequences * min(max_model_len, _USUAL_DRAFTED)
    return num_bytes + tokens * per_token


def largest_plan(options: EngineOptions, block_size: int, max_model_len: int) -> StepPlan:
    """A step of as many tokens as there can be, and of as many sequences. The first is as long as the model allows, and
    gets the log-probabilities of its prompt. All write over each other in one block."""
    most = min(options.max_num_batched_tokens, options.max_num_seqs * (max_model_len - 1))
    num_seqs = min(options.max_num_seqs, most)
    lengths = [1] * num_seqs
    left = most - num_seqs
    for place in range(num_seqs):
        lengths[place] += (added := min(left, max_model_len - 2))
        left -= added
    params = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, logprobs=options.max_logprobs, prompt_logprobs=options.max_logprobs
    )
    chunks = []
    for number, length in enumerate(lengths):
        end = length if number else max_model_len - 1
        blocks = array("q", [1] * -(-end // block_size))
        sequence = Sequence(number, [0] * end, end, params, block_ids=blocks, slot=number)
        chunks.append(Chunk(sequence, end - length, length, 1))
    return StepPlan(tuple(chunks))

"""How much memory the cache of keys and values, and recurrent states, may take."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from modelserver.backend import DeviceMemory, Reservation
from modelserver.backend import device_memory as budget_of

from .attention.kv_blocks import KvBlocks, KvLayout
from .blocks import held_blocks
from .options import EngineOptions

if TYPE_CHECKING:
    from .lora.layers import AdaptedLayers
    from .models.recurrent_states import RecurrentStates

__all__ = ["DeviceMemory", "Reservation", "available_bytes", "device_memory"]

# Of a CPU's free memory; the rest is for other models, activations and the system.
_CPU_SHARE = 0.4


def device_memory(device: torch.device) -> DeviceMemory:
    """The budget of `device`; a CUDA device without a number is the current one."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return budget_of(str(device))


def sized_for(options: EngineOptions, device: torch.device) -> EngineOptions:
    """The options with the sizes that the device's memory calls for, where none were given."""
    return options if device.type != "cuda" else options.for_gpu(torch.cuda.mem_get_info(device)[1])


def available_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """The bytes that KV caches may take now: a GPU's share less the memory in use, or a part of a CPU's free memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - gpu_memory_utilization))
    return int(psutil.virtual_memory().available * _CPU_SHARE)


logger = logging.getLogger(__name__)

# Small enough that short prompts share prefixes; large enough that gathering a block is a copy worth making.
_CPU_BLOCK_SIZE = 32
_GPU_BLOCK_SIZE = 16
_MIB = 1 << 20
_PURPOSE = " for its KV cache"
_ADVICE = "unload a model, or lower max_model_len or kv_cache_memory_bytes"


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The blocks, and what they take of the device's budget until it is released."""

    blocks: KvBlocks
    reservation: Reservation


def choose_block_size(options: EngineOptions, device: torch.device) -> int:
    return options.block_size or (_CPU_BLOCK_SIZE if device.type == "cpu" else _GPU_BLOCK_SIZE)


def reserve_kv_memory(
    layout: KvLayout,
    options: EngineOptions,
    *,
    max_model_len: int,
    window: int | None = None,
    device: torch.device,
    what: str,
    step_bytes: int = 0,
    most_share: float = 1.0,
    others_left: int | None = None,
) -> KvMemory:
    """As many blocks as `options` say, else as `max_num_seqs` of the greatest length need, if memory allows.

    On a CPU blocks take memory when they are first used. So a model gets half of the memory that is free and not
    promised to other models, and enough for one sequence of the greatest length if only that much is free.
    `window`: how far back any layer looks (`held_blocks`). `step_bytes` of the device are left to steps (`profile`). No
    more than `most_share` of the rest is taken, or what one sequence needs. `others_left`: the bytes that another rank
    has, where ranks share a network; each needs as many blocks.
    Where no layer attends, blocks take no memory and only count tokens.
    Never fewer than one sequence of an asked-for `max_model_len` needs: then UnavailableError.
    """
    block_size = choose_block_size(options, device)
    block_bytes = layout.block_bytes(block_size)
    per_sequence = held_blocks(max_model_len, block_size, window=window, chunk_len=options.chunk_len)
    most = options.num_gpu_blocks_override or options.max_num_seqs * per_sequence + 1
    least = options.num_gpu_blocks_override or (1 if options.max_model_len is None else per_sequence) + 1
    wanted = most * block_bytes
    free = available_bytes(device, options.gpu_memory_utilization) - step_bytes
    if others_left is not None:
        free = min(free, others_left)
    available: int | None = min(free, max(int(most_share * free), least * block_bytes))
    if options.kv_cache_memory_bytes is not None:
        wanted, available = min(wanted, options.kv_cache_memory_bytes), None
    if not block_bytes:
        available = None
    reservation = device_memory(device).reserve(
        wanted,
        available=available,
        least=least * block_bytes,
        enough=(per_sequence + 1) * block_bytes,
        what=what,
        purpose=_PURPOSE,
        advice=_ADVICE,
    )
    num_blocks = reservation.num_bytes // block_bytes if block_bytes else most
    try:
        blocks = KvBlocks(layout, num_blocks=num_blocks, block_size=block_size, device=device)
    except BaseException:
        reservation.release()
        raise
    reservation.settle()
    logger.info(
        "%s: its KV cache has %d blocks of %d tokens, %.1f MiB%s; %d sequences of %d tokens need %.1f MiB",
        what,
        num_blocks,
        block_size,
        num_blocks * block_bytes / _MIB,
        ", taken as blocks are used" if device.type == "cpu" else "",
        options.max_num_seqs,
        max_model_len,
        (options.max_num_seqs * per_sequence + 1) * block_bytes / _MIB,
    )
    return KvMemory(blocks, reservation)


def reserve_states(states: RecurrentStates, options: EngineOptions, *, device: torch.device, what: str) -> Reservation:
    """Slots for `max_num_seqs` sequences and their drafts, allocated. UnavailableError, if there is too little memory
    for them.
    """
    config, num_drafts, drafts = options.speculative_config, 0, ""
    if config is not None:
        num_drafts = config.most_drafts(options.max_num_seqs, is_gpu=device.type != "cpu")
        drafts = f" and {num_drafts} drafts of speculative_config"
    num_bytes = states.num_bytes(options.max_num_seqs, num_drafts)
    reservation = device_memory(device).reserve(
        num_bytes,
        available=available_bytes(device, options.gpu_memory_utilization),
        least=num_bytes,
        what=what,
        purpose=f" for the states of max_num_seqs {options.max_num_seqs} sequences{drafts}",
        advice="lower max_num_seqs, or unload a model",
    )
    try:
        states.allocate(options.max_num_seqs, num_drafts)
    except BaseException:
        reservation.release()
        raise
    reservation.settle()
    return reservation


def reserve_adapters(adapted: AdaptedLayers, options: EngineOptions, *, device: torch.device, what: str) -> Reservation:
    """Room for the adapters of `max_loras` slots, and of what is embedded. UnavailableError, if there is too little."""
    rank, num_bytes = options.lora_rank, adapted.num_bytes()
    reservation = device_memory(device).reserve(
        num_bytes,
        available=available_bytes(device, options.gpu_memory_utilization),
        least=num_bytes,
        what=what,
        purpose=f" for max_loras {options.num_lora_slots} adapters of rank {rank}",
        advice="lower max_loras or max_lora_rank, or unload a model",
    )
    logger.info("%s: %d adapters of rank %d may take %.1f MiB", what, options.num_lora_slots, rank, num_bytes / _MIB)
    try:
        if adapted.allocate():
            reservation.settle()
    except BaseException:
        reservation.release()
        raise
    return reservation

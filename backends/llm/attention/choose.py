"""Which implementation of attention an engine gets."""

from __future__ import annotations

import importlib.util

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..kernels import device_processors, kernels_for
from .chunked import ChunkedAttention
from .cpu_attention import CpuAttention
from .kv_blocks import KvBlocks, KvGroup
from .paged import AttentionSpec, PagedAttention
from .sdpa import SdpaAttention

_NAMES = ("auto", "cpu", "sdpa", "triton", "flashinfer")


def make_attention(name: str, blocks: KvBlocks, spec: AttentionSpec) -> PagedAttention:
    """ "auto" is Triton on a GPU that has it, our kernels on a CPU where they were built, else SDPA.

    UnsupportedError if the one asked for cannot run here.
    """
    attention = _make_unchunked(name, blocks, spec)
    return ChunkedAttention(attention, spec.chunks, blocks.block_size) if spec.chunks else attention


def _make_unchunked(name: str, blocks: KvBlocks, spec: AttentionSpec) -> PagedAttention:
    name = name.lower()
    if name not in _NAMES:
        raise InvalidArgumentError(f"attention_backend {name!r} is unknown: expected one of {', '.join(_NAMES)}")
    device = blocks.device
    group = blocks.layout.group
    kernels = kernels_for(device, group.heads_dtype)
    if kernels is not None and group.key_width > kernels.MAX_HEAD_DIM:
        kernels = None
    num_processors = device_processors(device)
    if name == "auto":
        name = "triton" if num_processors is not None else "cpu" if kernels is not None else "sdpa"
    if name == "sdpa":
        return SdpaAttention(blocks, spec)
    if name == "cpu":
        if kernels is None:
            raise UnsupportedError(
                f"attention_backend cpu needs a CPU, float32 or bfloat16, heads of at most 576, and a compiler at the "
                f"installation (MODELSERVER_PURE_PYTHON turns it off); this is {group.heads_dtype} on {device} with "
                f"heads of {group.key_width}"
            )
        return CpuAttention(kernels, blocks, spec)
    if name == "flashinfer":
        _check_flashinfer(group, spec)
    if device.type != "cuda":
        raise UnsupportedError(f"attention_backend {name} needs a GPU; this model is on {device}")
    if name == "triton":
        return _make_triton(blocks, spec, num_processors)
    if importlib.util.find_spec("flashinfer") is None:
        raise UnsupportedError(
            "attention_backend flashinfer was asked for, but the package flashinfer is not installed"
        )
    from .flashinfer_attention import FlashInferAttention

    return FlashInferAttention(blocks, spec)


def _make_triton(blocks: KvBlocks, spec: AttentionSpec, num_processors: int | None) -> PagedAttention:
    if num_processors is None:
        raise UnsupportedError(
            "attention_backend triton needs compute capability 8.0, and a Triton that starts (the log says why one "
            f"does not): use auto on {blocks.device}"
        )
    from .triton_attention import TritonAttention, TritonLatentAttention

    if not blocks.layout.group.shared_width:
        return TritonAttention(blocks, spec, num_processors=num_processors)
    shared_bytes = torch.cuda.get_device_properties(blocks.device).shared_memory_per_block_optin
    return TritonLatentAttention(blocks, spec, num_processors=num_processors, shared_bytes=shared_bytes)


def _check_flashinfer(group: KvGroup, spec: AttentionSpec) -> None:
    lacks = {
        "read kv_cache_dtype int8 or fp8": bool(group.num_scales),
        "attend to latents": bool(group.shared_width),
        "attend within chunks": bool(spec.chunks),  # one plan of it at a time
    }
    for what, is_wanted in lacks.items():
        if is_wanted:
            raise UnsupportedError(f"attention_backend flashinfer does not {what}: auto and triton do")

"""The computation of each Triton kernel in plain torch and float32, as the reference of its tests."""

from __future__ import annotations

import torch

from .kv_blocks import decoded, encoded


def rope_and_store(
    heads: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """See `triton_kernels.rope_and_store`."""
    num_parts, num_kv_heads = blocks.shape[2:4]
    num_heads = heads.shape[1] - num_parts * num_kv_heads
    turned = heads[:, : num_heads + num_kv_heads]
    if norm is not None:
        weights, eps = norm
        turned = torch.nn.functional.rms_norm(turned, turned.shape[-1:], None, eps) * weights
    turned = turned.float()
    if rotation is not None:
        cosines, sines = (table.float() for table in rotation)
        width = cosines.shape[-1]
        partners = turned[..., :width].roll(width // 2, dims=-1)
        rotated = turned[..., :width] * cosines + partners * sines
        turned = torch.cat((rotated, turned[..., width:]), dim=-1)
    turned = turned.to(heads.dtype)
    kept = slots >= 0
    block_size = blocks.shape[1]
    places, offsets = slots[kept] // block_size, slots[kept] % block_size
    pairs = torch.stack((turned[kept, num_heads:], heads[kept, num_heads + num_kv_heads :])[:num_parts], dim=1)
    if scales is None:
        blocks[places, offsets] = pairs
    else:
        codes, own = encoded(pairs, blocks.dtype)
        blocks.view(torch.uint8)[places, offsets] = codes.view(torch.uint8)
        scales[places, offsets] = own[..., 0]
    return turned[:, :num_heads].contiguous()


def decode_attention(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    shared_width: int | None = None,
) -> torch.Tensor:
    """See `triton_kernels.decode_attention`."""
    ones = torch.ones_like(lens)
    return prefill_attention(
        queries,
        blocks,
        tables,
        lens,
        num_queries=ones,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scales=scales,
        shared_width=shared_width,
    )


def prefill_attention(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    num_queries: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    shared_width: int | None = None,
) -> torch.Tensor:
    """See `triton_kernels.prefill_attention`; rows follow each other without gaps.

    `shared_width`: the blocks hold keys alone, whose last values are the values (`triton_latent`).
    """
    if scales is not None:
        blocks = decoded(blocks, scales[..., None], torch.float32)
    outputs = []
    start = 0
    for row, (count, length) in enumerate(zip(num_queries.tolist(), lens.tolist(), strict=True)):
        own = queries[start : start + count].float()
        start += count
        if length == 0:
            outputs.append(torch.zeros(count, own.shape[1] * (shared_width or own.shape[2])))
            continue
        kv = blocks[tables[row].long()].flatten(0, 1)[:length].float()
        groups = own.shape[1] // kv.shape[2]
        keys, values = (kv[:, part].repeat_interleave(groups, dim=1) for part in (0, -1))
        if shared_width is not None:
            values = values[..., -shared_width:]
        scores = torch.einsum("qhd,khd->hqk", own, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length)[None, :] - torch.arange(length - count, length)[:, None]
        is_seen = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
        scores = scores.masked_fill(~is_seen.to(scores.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
    return torch.cat([output.to(queries) for output in outputs])

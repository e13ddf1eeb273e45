"""Rotary position embeddings: reading a checkpoint's config, and the tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modelserver.backend import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """`dim` is how much of a head is rotated. `kind` is transformers' `rope_type`; the rest belongs to it."""

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    max_position_embeddings: int = 0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    is_truncated: bool = True
    long_factor: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    # Of models whose pictures have positions by time, height and width: how many frequencies each of them turns. They
    # lie one behind the other, or (`is_interleaved`) in turns.
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False

    @property
    def longest(self) -> int:
        """Positions that can be told apart: scaling stretches what the network was trained on."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        return int(self.original_max_position_embeddings * self.factor) if self.kind == "yarn" else 0

    def tables(self, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [max_len, dim]; each frequency twice, as the two halves of a head use it."""
        inverse_frequencies, magnitude = _KINDS[self.kind](self, max_len)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * magnitude, angles.sin() * magnitude

    def axes(self) -> torch.Tensor:
        """Of each value that is rotated [dim], whether the position by time (0), height (1) or width (2) turns it."""
        half = self.dim // 2
        if self.is_interleaved:
            axes = torch.zeros(half, dtype=torch.int64)
            for axis in (1, 2):
                axes[axis : 3 * self.sections[axis] : 3] = axis
        else:
            axes = torch.repeat_interleave(torch.arange(3), torch.tensor(self.sections))
        return torch.cat((axes, axes))


def read_rope(entries: Mapping[str, Any], *, head_dim: int, config: Mapping[str, Any]) -> Rope:
    """From `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before), merged with `config`.

    UnsupportedError for a kind that we do not know.
    """
    kind = str(entries.get("rope_type") or entries.get("type") or "default")
    # The first name of one, and rotations in sections, which may be of any kind.
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind not in _KINDS:
        raise UnsupportedError(f"config.json asks for rope_type {kind!r}; known are {', '.join(sorted(_KINDS))}")
    partial = entries.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    max_positions = int(config.get("max_position_embeddings") or 2048)
    original = (
        config.get("original_max_position_embeddings")
        or entries.get("original_max_position_embeddings")
        or max_positions
    )
    factor = entries.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = max_positions / original
    optional = {
        name: float(entries[name])
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        if entries.get(name) is not None
    }
    return Rope(
        theta=float(entries.get("rope_theta") or config.get("rope_theta") or 10000.0),
        dim=int(head_dim * float(partial)),
        kind=kind,
        factor=float(factor or 1.0),
        max_position_embeddings=max_positions,
        original_max_position_embeddings=int(original),
        mscale=entries.get("mscale"),
        mscale_all_dim=entries.get("mscale_all_dim"),
        is_truncated=bool(entries.get("truncate", True)),
        long_factor=tuple(entries.get("long_factor") or ()),
        short_factor=tuple(entries.get("short_factor") or ()),
        sections=_sections(entries, int(head_dim * float(partial)) // 2),
        is_interleaved=bool(entries.get("mrope_interleaved", False)),
        **optional,
    )


def _sections(entries: Mapping[str, Any], num_frequencies: int) -> tuple[int, ...]:
    sections = tuple(int(size) for size in entries.get("mrope_section") or ())
    if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != num_frequencies):
        raise ValueError(f"mrope_section {list(sections)}: expected three sizes with the sum {num_frequencies}")
    return sections


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(rope: Rope, _max_len: int) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, rope.dim), 1.0


def _linear(rope: Rope, _max_len: int) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, rope.dim) / rope.factor, 1.0


def _dynamic(rope: Rope, max_len: int) -> tuple[torch.Tensor, float]:
    """NTK scaling for the longest sequence that can come: keys stay in the cache, so their base cannot change."""
    longest = max(max_len, rope.max_position_embeddings)
    stretch = rope.factor * longest / rope.max_position_embeddings - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim), 1.0


def _llama3(rope: Rope, _max_len: int) -> tuple[torch.Tensor, float]:
    frequencies = _plain(rope.theta, rope.dim)
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, frequencies)
    is_between = (wavelengths >= original / rope.high_freq_factor) & (wavelengths <= original / rope.low_freq_factor)
    return torch.where(is_between, blended, scaled), 1.0


def _yarn(rope: Rope, _max_len: int) -> tuple[torch.Tensor, float]:
    """https://arxiv.org/abs/2309.00071: interpolate what turns slowly, leave what turns fast, ramp between."""
    frequencies = _plain(rope.theta, rope.dim)

    def dimension(num_rotations: float) -> float:
        span = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rope.dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp), _yarn_magnitude(rope)


def _yarn_magnitude(rope: Rope) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope(rope: Rope, max_len: int) -> tuple[torch.Tensor, float]:
    """The long factors as soon as sequences may exceed the original length: cached keys cannot change them later."""
    original = rope.original_max_position_embeddings
    factors = rope.long_factor if max_len > original else rope.short_factor
    magnitude = rope.attention_factor
    if magnitude is None:
        magnitude = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents), magnitude


_KINDS: dict[str, Callable[[Rope, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

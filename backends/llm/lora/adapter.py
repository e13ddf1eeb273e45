"""An adapter in host memory: two narrow matrices for each module that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.linear_tensors import FLOATS, Part

# A module's weight in floats [outputs, inputs], as the checkpoint has it. Raises ServerErrors.
BaseWeight = Callable[[Part], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Of one module: y += (x down^T) up^T. The scale is in `up`.

    `down` [rank, inputs], `up` [outputs, rank]. `gain` [outputs] is DoRA's: what the module computes, without its bias,
    is multiplied by it before; `up` has it already.
    """

    down: torch.Tensor
    up: torch.Tensor
    gain: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`modules` by their names inside the decoder, as checkpoints have them. `digest` is that of its files' bytes."""

    name: str
    digest: bytes
    modules: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The greatest of its modules."""
        return max(module.rank for module in self.modules.values())

    @property
    def num_bytes(self) -> int:
        return sum(module.down.nbytes + module.up.nbytes for module in self.modules.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The network that adapters are for: its modules, and the heads of its attention.

    `weight` reads a module's own weight, which DoRA needs. `kind` names the network in errors.
    """

    modules: Mapping[str, Part]
    max_rank: int
    num_heads: int
    num_kv_heads: int
    kind: str
    weight: BaseWeight


def check_modules(what: str, modules: Mapping[str, LowRank], target: Target) -> None:
    """Raise ServerErrors for modules that the network does not have, or that have other shapes there."""
    if not modules:
        raise InvalidArgumentError(f"{what} changes no module")
    for name, module in modules.items():
        part = target.modules.get(name)
        if part is None:
            raise UnsupportedError(
                f"{what} changes the module {name}, and adapters are applied to linear layers of attention and of "
                f"dense feed-forward only; in this {target.kind} these are "
                f"{', '.join(sorted({each.rpartition('.')[2] for each in target.modules}))}: train it for these"
            )
        down, up, rank = tuple(module.down.shape), tuple(module.up.shape), module.rank
        expected = (rank, part.num_inputs), (part.num_outputs, rank)
        if (down, up) != expected:
            raise InvalidArgumentError(
                f"{what} has matrices of {list(down)} and {list(up)} for the module {name}, which takes "
                f"{part.num_inputs} values and gives {part.num_outputs}: it was trained for another model"
            )
        if rank > target.max_rank:
            raise InvalidArgumentError(
                f"{what} has rank {rank} for the module {name}, which is more than max_lora_rank {target.max_rank}: "
                "raise that option in model.json"
            )


def scaled(up: torch.Tensor, scale: float) -> torch.Tensor:
    """In the datatype of `up` where that holds all products exactly, else in float32."""
    product = up.float() * scale
    narrow = product.to(up.dtype)
    return narrow if torch.equal(narrow.float(), product) else product


def check_floats(what: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Raise UnsupportedError for anything but a matrix in floats."""
    if tensor.dtype not in FLOATS or tensor.dim() != 2:
        raise UnsupportedError(
            f"{what} has {name} of shape {list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}: expected "
            "a matrix in float32, bfloat16 or float16"
        )
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def combined(parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Several adapters, each as much as its scale says, as one: the sum of what they add."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    name = " and ".join(f"{adapter.name} x {scale:g}" for adapter, scale in parts)
    modules: dict[str, list[LowRank]] = {}
    for adapter, scale in parts:
        for module, each in adapter.modules.items():
            if each.gain is not None:
                raise UnsupportedError(
                    f"the adapter '{adapter.name}' was trained with use_dora, so it can only be used alone and with "
                    "scale 1"
                )
            modules.setdefault(module, []).append(LowRank(each.down, scaled(each.up, scale)))
    digest = b"".join(adapter.digest + repr(scale).encode() for adapter, scale in parts)
    return Adapter(name, digest, {module: _side_by_side(each) for module, each in modules.items()})


def _side_by_side(modules: Sequence[LowRank]) -> LowRank:
    return LowRank(torch.cat([each.down for each in modules]), torch.cat([each.up for each in modules], dim=1))

"""The linear layers of networks of transformers on a CPU, in the form in which it multiplies them fastest.

torch gives them to BLAS, which on processors of AMD takes more than twice as long as oneDNN does for weights in its own
order (measured in float32 with AVX-512, from 64 rows on).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .linear import Linear, PlainLinear, float_linear

logger = logging.getLogger(__name__)

# Errors of code that is called in a way that it was not written for.
_UNEXPECTED = (AttributeError, TypeError, LookupError, ValueError, RuntimeError, AssertionError)
# Of results, relative to their size.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1


class PackedModule(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Stands in for a `torch.nn.Linear`. Its `weight` says shape and datatype, and has no values."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = linear.bias
        self._product: Linear = PlainLinear(linear.weight.detach(), self._detached_bias)

    def pack(self, linear: torch.nn.Linear) -> None:
        self._product = float_linear(linear.weight.detach(), self._detached_bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, self.in_features)
        if not flat.shape[0]:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        return self._product(flat, None).view(*rows.shape[:-1], self.out_features)

    @property
    def _detached_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.detach()


def pack_linears(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> None:
    """Pack the layers that `run` calls. Nothing changes where the network reads their weights in other ways, which is
    tried out first: `run` gives the same then and before. Each layer's weight is freed before the next is packed.
    """
    found = [module for module in model.modules() if _is_plain(module)]
    if not found:
        return
    called: set[Any] = set()
    hooks = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in found]
    try:
        with torch.inference_mode():
            expected = run()
    finally:
        for hook in hooks:
            hook.remove()
    # The weight of a head may be that of the embedding too, and stays as it is.
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    places = [
        (parent, name, module)
        for parent in list(model.modules())
        for name, module in parent._modules.items()
        if module in called and uses[id(module.weight)] == 1
    ]
    packed = {module: PackedModule(module) for _, _, module in places}
    for parent, name, module in places:
        setattr(parent, name, packed[module])
    try:
        with torch.inference_mode():
            error = float((run() - expected).float().norm() / expected.float().norm())
        most = _TOLERANCE if all(module.weight.dtype is torch.float32 for module in packed) else _HALF_TOLERANCE
        if not error < most:
            raise AssertionError(f"results differ by {error:.1%}")
    except _UNEXPECTED as error:
        logger.info("the linear layers of %s are not packed: %s", type(model).__name__, error)
        for parent, name, module in places:
            setattr(parent, name, module)
        return
    places.clear()
    expected = torch.empty(0)
    for module in list(packed):
        with torch.inference_mode():
            packed.pop(module).pack(module)
        called.discard(module)
        module.weight = None


def _is_plain(module: torch.nn.Module) -> bool:
    return (
        type(module) is torch.nn.Linear
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
    )

"""Walks through a network before it is built: a tensor that is missing or wrong is named before memory is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from ..checkpoint import Checkpoint, HfCheckpoint
from ..models.linear import GroupedLinear, Linear, ListedLinears, TokenEmbedding
from ..models.linear_tensors import LinearTensors
from .scheme import Scheme
from .stored import StoredScheme


class UnreadCheckpoint(HfCheckpoint):
    """The same checkpoint, whose tensors have shapes and datatypes, but no values and no memory.

    Vectors of integers are read: they say where groups, widths and states lie.
    """

    def tensor(self, name: str) -> torch.Tensor:
        shape, dtype = self.shape(name), self.dtype(name)
        is_read = len(shape) <= 1 and not dtype.is_floating_point
        return super().tensor(name) if is_read else torch.empty(shape, dtype=dtype, device="meta")


class NoLayer:
    """In place of layers and embeddings of a network that is only walked through."""

    def __call__(self, *_: Any) -> torch.Tensor:
        raise AssertionError("a network without weights is not called")

    def add_to(self, *_: Any) -> torch.Tensor:
        raise AssertionError("a network without weights is not called")


class WalkingScheme(Scheme):
    """Sees each layer that a network asks for, and makes none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:  # noqa: ARG003 - of no config
        raise AssertionError("checking needs a scheme that reads checkpoints")

    def linear(self, tensors: LinearTensors) -> Linear:  # noqa: ARG002 - each sees other things
        return NoLayer()

    def make_linear(self, tensors: LinearTensors) -> Linear:
        return self.linear(tensors)

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        return ListedLinears([self.linear(tensors) for tensors in experts])

    def dense(self, tensors: LinearTensors) -> torch.Tensor:
        self.linear(tensors)
        return torch.empty(tensors.num_outputs, tensors.parts[0].num_inputs, device="meta")

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:  # noqa: ARG002
        return NoLayer()


class CheckingScheme(WalkingScheme):
    """Asks a scheme to read each of its layers from a checkpoint without values; None: all layers are floats."""

    def __init__(self, scheme: StoredScheme | None, unread: Checkpoint) -> None:
        self._scheme = scheme
        self._unread = unread

    def linear(self, tensors: LinearTensors) -> Linear:
        unread = replace(tensors, checkpoint=self._unread, device=torch.device("meta"))
        if self._scheme is not None:
            self._scheme.check(unread)
        for part in unread.parts:
            if self._scheme is None:
                unread.check_floats(part)
            if unread.has(part, "bias"):
                unread.stored(part, "bias", (part.num_outputs,))
        return NoLayer()

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:
        self.linear(tensors)
        return NoLayer()

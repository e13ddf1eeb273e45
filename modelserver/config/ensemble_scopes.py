"""Scopes of an ensemble's steps: a step runs once, or once for each response of a decoupled step before it.

Steps after a decoupled step are in its scope and run for each of its responses; scope 0 is the whole request.
Scopes nest. A step may use tensors of its own scope and of enclosing scopes, which are the same in all of its
runs. Tensors of sibling scopes are unrelated, so no step may need both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelserver.config.ensemble_graph import EnsembleGraph


@dataclass(frozen=True, slots=True)
class Scopes:
    """`parents` has the scope around each scope (-1 around scope 0). `opened` is by decoupled step."""

    parents: tuple[int, ...]
    of_step: tuple[int, ...]
    of_tensor: Mapping[str, int]
    opened: Mapping[int, int]
    of_outputs: int


@dataclass(frozen=True, slots=True)
class ScopeConflict:
    """Something that needs tensors of several scopes: a step, or with `step` None the outputs of the ensemble."""

    step: int | None
    message: str
    is_input: bool = True


def find_scopes(
    graph: EnsembleGraph, is_decoupled: Sequence[bool], outputs: Iterable[str]
) -> tuple[Scopes, tuple[ScopeConflict, ...]]:
    """The scopes of a graph without cycles, and the conflicts. With conflicts the scopes are not usable."""
    finder = _Finder(graph)
    for index in graph.order():
        finder.add(index, is_decoupled=is_decoupled[index])
    of_outputs = finder.deepest(None, outputs)
    of_step = tuple(finder.of_step[index] for index in range(len(graph.steps)))
    scopes = Scopes(tuple(finder.parents), of_step, finder.of_tensor, finder.opened, of_outputs)
    return scopes, tuple(finder.conflicts)


class _Finder:
    def __init__(self, graph: EnsembleGraph) -> None:
        self._graph = graph
        self.parents = [-1]
        self.of_step: dict[int, int] = {}
        self.of_tensor: dict[str, int] = dict.fromkeys(graph.inputs, 0)
        self.opened: dict[int, int] = {}
        self.conflicts: list[ScopeConflict] = []

    def add(self, index: int, *, is_decoupled: bool) -> None:
        """Place a step; the steps that it waits for are already placed."""
        scope = self.of_step[index] = self.deepest(index, self._graph.needs(index))
        written = dict.fromkeys(self._graph.steps[index].output_map.values())
        if is_decoupled:
            scope = self.opened[index] = self._open(scope, written)
        for tensor in written:
            if self.of_tensor.setdefault(tensor, scope) != scope:
                message = f"tensor '{tensor}' is also written by a step that answers more or less often than this one"
                self.conflicts.append(ScopeConflict(index, message, is_input=False))

    def deepest(self, step: int | None, tensors: Iterable[str]) -> int:
        """The innermost scope of tensors that may be used together."""
        deepest, source = 0, ""
        for tensor in tensors:
            scope = self.of_tensor.get(tensor, 0)
            if self._is_within(scope, deepest):
                deepest, source = scope, tensor
            elif not self._is_within(deepest, scope):
                who = "the outputs of the ensemble" if step is None else self._graph.name_of(step)
                verb = "come" if step is None else "receives inputs"
                message = (
                    f"{who} {verb} from different decoupled models: '{source}' and '{tensor}' do not belong together"
                )
                self.conflicts.append(ScopeConflict(step, message))
        return deepest

    def _open(self, around: int, written: Iterable[str]) -> int:
        """The scope of a decoupled step: that of the other step that may write the same tensors, if there is one."""
        for tensor in written:
            shared = self.of_tensor.get(tensor)
            if shared in self.opened.values() and self.parents[shared or 0] == around:
                return shared or 0
        self.parents.append(around)
        return len(self.parents) - 1

    def _is_within(self, scope: int, other: int) -> bool:
        while scope not in (other, -1):
            scope = self.parents[scope]
        return scope == other

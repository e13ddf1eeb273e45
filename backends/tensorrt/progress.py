"""The progress of a build: one number from TensorRT's nested phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Progress is reported in at most this many steps, so that the build does not wait for the pipe.
_RESOLUTION = 200


@dataclass(slots=True)
class _Phase:
    parent: str | None
    num_steps: int
    num_done: int = 0


class PhaseTree:
    """The phases that are under way. Fractions never fall."""

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        """`tell` gets the name of the innermost phase, and the fraction of the whole that is done, 0 to 1."""
        self._tell = tell
        self._phases: dict[str, _Phase] = {}
        self._root: str | None = None
        self._told = -1

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        if self._root is None or self._root not in self._phases:
            self._root = name
        self._phases[name] = _Phase(parent, max(1, num_steps))
        self._tell_change(name)

    def step(self, name: str, done: int) -> None:
        """`done` is the index of the step that is complete."""
        if name in self._phases:
            self._phases[name].num_done = done + 1
            self._tell_change(name)

    def finish(self, name: str) -> None:
        phase = self._phases.pop(name, None)
        if phase is not None and name == self._root:
            self._report(name, 1.0)

    def fraction(self) -> float:
        return self._fraction(self._root) if self._root in self._phases else 0.0

    def _fraction(self, name: str | None) -> float:
        """Of one phase: its steps that are done, and of the one under way as much as its inner phase has done."""
        if name is None:
            return 0.0
        phase = self._phases[name]
        inner = max((self._fraction(other) for other, it in self._phases.items() if it.parent == name), default=0.0)
        return min(1.0, (phase.num_done + inner) / phase.num_steps)

    def _tell_change(self, name: str) -> None:
        self._report(name, self.fraction())

    def _report(self, name: str, fraction: float) -> None:
        part = int(fraction * _RESOLUTION)
        if part > self._told:
            self._told = part
            self._tell(name, part / _RESOLUTION)


def progress_monitor(trt: Any, tree: PhaseTree) -> Any:
    """A `trt.IProgressMonitor` that feeds `tree`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # a base that is only known at run time
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            tree.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            tree.step(phase_name, step)
            return True  # go on; to cancel a build, its process is ended

        def phase_finish(self, phase_name: str) -> None:
            tree.finish(phase_name)

    return Monitor()

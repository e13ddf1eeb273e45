from __future__ import annotations

import pytest
from modelserver_backends.tensorrt.progress import PhaseTree


def test_phases_within_phases_make_one_number() -> None:
    told: list[tuple[str, float]] = []
    tree = PhaseTree(lambda phase, fraction: told.append((phase, fraction)))
    tree.start("build", None, 2)
    tree.start("parse", "build", 4)
    tree.step("parse", 1)
    assert tree.fraction() == pytest.approx(0.25)
    tree.finish("parse")
    tree.step("build", 0)
    assert tree.fraction() == pytest.approx(0.5)
    tree.start("time", "build", 0)
    tree.step("unknown", 3)
    tree.step("time", 0)
    tree.finish("time")
    tree.step("build", 1)
    tree.finish("build")
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert told[0] == ("build", 0.0)
    assert told[-1][1] == 1.0
    assert tree.fraction() == 0.0


def test_not_every_step_is_told() -> None:
    told: list[float] = []
    tree = PhaseTree(lambda phase, fraction: told.append(fraction))
    tree.start("build", None, 100_000)
    for step in range(100_000):
        tree.step("build", step)
    assert len(told) <= 202

"""Checkpoints that the tests of this room share, written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from modelserver_backends.llm import kernels
from support.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny random checkpoint of a family (`support.tiny_checkpoints.FAMILIES`)."""

    @cache
    def written(family: str) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / family, family)

    return written


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def is_asynchronous(request: pytest.FixtureRequest) -> bool:
    """Whether a runner launches a step before it has read the one before."""
    return bool(request.param)


@pytest.fixture
def rows_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in few bits are multiplied as the floats that they stand for: the kernels in C make rows 8 bits wide, so
    that greedy tokens need not be those of a float twin.
    """
    monkeypatch.setattr(kernels, "PACKED_KERNELS", None)
    monkeypatch.setenv("MODELSERVER_PURE_PYTHON", "1")  # for ranks, which are processes of their own

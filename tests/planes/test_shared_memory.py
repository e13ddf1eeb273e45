"""Regions whose files their clients change: never the end of the server, with the part in C and without it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from modelserver.core import accelerator
from modelserver.errors import InvalidArgumentError
from modelserver.planes import shared_memory
from modelserver.planes.shared_memory import Region, RegionStatus

NUM_BYTES = 1 << 16


@pytest.fixture
def path() -> Iterator[Path]:
    """A shared memory object of ones."""
    made = shared_memory.DIRECTORY / f"modelserver-test-{uuid.uuid4().hex}"
    made.write_bytes(b"\1" * NUM_BYTES)
    yield made
    made.unlink()


@pytest.fixture(params=["native", "python"])
def region(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    if request.param == "python":
        monkeypatch.setattr(shared_memory, "guard", None)
    elif accelerator.guard is None:
        pytest.fail("the part in C was not built")
    opened = Region(RegionStatus("r", f"/{path.name}", 0, NUM_BYTES))
    yield opened
    opened.close()


def test_what_is_read_outlives_the_region_and_the_file(region: Region, path: Path) -> None:
    data = np.frombuffer(region.read(0, NUM_BYTES), np.uint8)
    assert data.sum() == NUM_BYTES
    os.truncate(path, 4096)
    assert data.sum() in (NUM_BYTES, 4096), "a copy, or zeros where nothing is left"
    with pytest.raises(InvalidArgumentError, match="'r' has become smaller since it was registered"):
        region.check_whole()
    os.truncate(path, NUM_BYTES)


def test_a_region_that_was_touched_beyond_its_file_stays_broken(region: Region, path: Path) -> None:
    data = np.frombuffer(region.read(0, NUM_BYTES), np.uint8)
    os.truncate(path, 0)
    data.sum()
    with pytest.raises(InvalidArgumentError, match="register it as it is now"):
        region.read(0, 1)
    with pytest.raises(InvalidArgumentError, match="register it as it is now"):
        region.write(0, b"x")


def test_what_is_written_is_in_the_file(region: Region, path: Path) -> None:
    region.write(4000, b"abc" * 100)
    assert path.read_bytes()[4000:4300] == b"abc" * 100


def test_guards_are_given_back(path: Path) -> None:
    for _ in range(5000):  # there are 4096
        Region(RegionStatus("r", f"/{path.name}", 0, NUM_BYTES)).close()


def test_a_bus_error_elsewhere_still_ends_the_process(path: Path) -> None:
    source = f"""
import faulthandler, mmap, os
from modelserver.planes.shared_memory import Region, RegionStatus
faulthandler.enable()
region = Region(RegionStatus("r", "/{path.name}", 0, {NUM_BYTES}))
descriptor = os.memfd_create("other")
os.ftruncate(descriptor, 4096)
other = mmap.mmap(descriptor, 4096)
os.ftruncate(descriptor, 0)
other[0]
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -7
    assert "Fatal Python error: Bus error" in ended.stderr

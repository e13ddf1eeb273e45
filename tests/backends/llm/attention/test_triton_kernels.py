"""The kernels equal their torch twins, in Triton's interpreter (no GPU)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
CASES = Path(__file__).with_name("triton_cases.py")
COMPILED = Path(__file__).with_name("triton_compiled.py")
KERNELS = [
    "_add_expanded",
    "_add_splits",
    "_attend",
    "_decode",
    "_draw",
    "_expand",
    "_gate",
    "_merge",
    "_multiply",
    "_prefill",
    "_rope_and_store",
    "_round_rows",
    "_shrink",
    "_soften",
]


@pytest.mark.tool("triton")
@pytest.mark.parametrize(
    "case",
    [
        "adapters",
        "adapted",
        "rope_and_store",
        "decode",
        "prefill",
        "backend",
        "codes",
        "latent",
        "draw",
        "gate",
        "launches",
        "captured",
        "mixture",
    ],
)
def test_kernels_in_the_interpreter_equal_their_twins(case: str) -> None:
    """In a process of its own: Triton asks for its interpreter when kernels are defined."""
    ended = subprocess.run(
        [sys.executable, str(CASES), case],
        env={
            "TRITON_INTERPRET": "1",
            "MODELSERVER_PURE_PYTHON": "1",  # for weights in few bits, torch's own products stand beside the kernels
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join([*sys.path, str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.timeout(400)
@pytest.mark.tool("triton")
@pytest.mark.parametrize(
    ("capability", "what"),
    [*((capability, "shapes") for capability in (80, 86, 89, 90, 100, 120)), (80, "forms"), (90, "forms")],
)
def test_kernels_compile_for_gpus(capability: int, what: str, tmp_path: Path) -> None:
    """For an A100, an H100, an A10, an L4, a B200 and an RTX 5090; Triton has all that this needs.

    Each program fits the shared memory of the GPU, and its registers.
    """
    ended = subprocess.run(
        [sys.executable, str(COMPILED), str(capability), what],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
            "MODELSERVER_PURE_PYTHON": "1",
            "PYTHONPATH": ":".join([*sys.path, str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.split() == KERNELS

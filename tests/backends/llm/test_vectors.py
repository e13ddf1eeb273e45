"""The kernels in C for processors that are not here, and under sanitizers: each is built out of the tree as it is.

`vectors/packed.c` and `vectors/attention.c` compare all sets of instructions that run: on the processor itself,
emulated by SIMDe, or by qemu.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.tools import find_tool, tool

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "backends" / "llm"
HARNESS = Path(__file__).parent / "vectors"
# Functions that are not inlined compile in a tenth of the time.
QUICK = ("-O1", "-DINLINED=static", f"-I{SOURCES}", "-Wno-psabi", "-Wno-unused-function")
# setup.py gives the same to the products.
FLAGS = {"packed": ("-ffp-contract=off",), "attention": ()}
# Without it the generic products round twice where the others round once.
FUSED = ("-mfma",) if find_tool("avx2") else ()
EMULATED = ("-march=x86-64-v3", "-DEMULATED", "-flax-vector-conversions", "-include", str(HARNESS / "emulated.h"))
# Arguments, tables and shapes; the test before has the kernels do their sums.
CHOSEN = (
    "refused or plan or outside or experts or not_whole or factors or embedding or half_precision or rows_are or share"
    " or (blocks_are_packed and generic) or are_filled"
)
TESTS = (
    "test_kernels.py",
    "attention/test_cpu_attention.py",
    "quantization/test_packed_kernels.py",
    "quantization/test_gguf.py",
)
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(command: Sequence[str | Path], **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(name: str, place: Path, compiler: str, *flags: str) -> Path:
    program = place / name
    run([tool(compiler), *QUICK, *FLAGS[name], *flags, HARNESS / f"{name}.c", "-o", program, "-lm"])
    return program


@pytest.mark.tool("gcc", "simde", "avx2")
def test_wide_vectors_and_vnni_are_emulated(tmp_path: Path) -> None:
    """Every set of x86 makes the same bits as the generic one."""
    found = run([built("packed", tmp_path, "gcc", *EMULATED)])
    assert found.split() == ["avx512vnni", "avxvnni", "avx512", "avx2", "generic"]
    assert run([built("attention", tmp_path, "gcc", *EMULATED)]).split() == ["16", "8", "4"]


@pytest.mark.tool("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
def test_aarch64_is_emulated(tmp_path: Path) -> None:
    """With the instructions of a processor that has all, and the choice of those that two others have."""
    packed, attention = (built(name, tmp_path, "aarch64-linux-gnu-gcc", "-static") for name in FLAGS)
    emulator = tool("qemu-aarch64-static")
    assert run([emulator, "-cpu", "max", packed]).split() == ["i8mm", "dotprod", "generic"]
    assert run([emulator, "-cpu", "neoverse-n1", packed, "names"]).split() == ["dotprod", "generic"]
    assert run([emulator, "-cpu", "cortex-a72", packed, "names"]).split() == ["generic"]
    assert run([emulator, "-cpu", "max", attention]).split() == ["4"]


@pytest.mark.tool("gcc")
def test_sanitizers_find_nothing_in_the_kernels(tmp_path: Path) -> None:
    for name, generic in (("packed", "generic"), ("attention", "4")):
        assert run([built(name, tmp_path, "gcc", *SANITIZED, *FUSED)]).split()[-1] == generic


@pytest.mark.tool("gcc")
def test_sanitizers_find_nothing_in_the_modules(tmp_path: Path) -> None:
    """Both modules are built with sanitizers and tested in a process of their own."""
    include = f"-I{sysconfig.get_path('include')}"
    for name, flags in (("_kernels", ()), ("_packed_linear", FLAGS["packed"])):
        command = [tool("gcc"), *QUICK, *flags, *SANITIZED, "-shared", "-fPIC", include, SOURCES / f"{name}.c"]
        run([*command, "-o", tmp_path / f"{name}.abi3.so"])
    libraries = [run([tool("gcc"), f"-print-file-name=lib{name}.so"]).strip() for name in ("asan", "ubsan")]
    printed = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "replaced", "-p", "no:cacheprovider", "-k", CHOSEN]
        + [f"{Path(__file__).parent}/{test}" for test in TESTS],
        KERNELS_DIRECTORY=str(tmp_path),
        PYTHONPATH=str(HARNESS),
        LD_PRELOAD=":".join(libraries),
        ASAN_OPTIONS="detect_leaks=0",
    )
    assert " passed" in printed

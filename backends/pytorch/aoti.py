"""AOTInductor packages: a model compiled to a library, which torch loads and calls.

A call holds the interpreter's lock from start to end, so these models live in processes of their own
(`TorchBackend.needs_process`). The library runs only on machines like the one that it was compiled on, and dies of an
illegal instruction elsewhere; its metadata are compared with this machine before it is loaded.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from modelserver.backend import UnsupportedError

from .binding import Arguments
from .program import Program

# The only model of a package that torch's own functions write by default.
_MODEL = "model"
# The library looks at the shapes and datatypes that it is given; without, it reads past the end of small inputs.
_CHECK_INPUTS = "AOTI_RUNTIME_CHECK_INPUTS"
_CPU_INFO = Path("/proc/cpuinfo")
# Instruction sets as torch names them -> flags of /proc/cpuinfo.
_CPU_FLAGS = {
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_TILE": "amx_tile",
    "AMX_FP16": "amx_fp16",
    "ASIMD": "asimd",
    "SVE256": "sve",
}


def load_package(path: Path, device: str) -> Program:
    """The model of a package. Raises UnsupportedError if it was not compiled for this machine, or for this device.

    Its arguments are called `ARGS[0]`, `ARGS[1][key]`, `KWARGS[name]`, and its results `RESULT`, `RESULT[0]`,
    `RESULT[key]`, by their places in the call that was compiled.
    """
    loader_class: Any = torch._C._aoti.AOTIModelPackageLoader
    metadata = loader_class.load_metadata_from_package(str(path), _MODEL)
    problem = unfit(
        metadata, device, machine=platform.machine(), cpu_flags=_cpu_flags(), capability=_capability(device)
    )
    if problem is not None:
        raise UnsupportedError(f"{path} {problem}; compile it here, with torch._inductor.aoti_compile_and_package")
    os.environ[_CHECK_INPUTS] = "1"
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
    # One thread at a time calls the package of a process, and a CUDA graph holds none of the events of its own locks.
    compiled: Any = torch._inductor.aoti_load_package(str(path), run_single_threaded=True, device_index=index)
    given, taken = (pytree.treespec_loads(text) for text in compiled.loader.get_call_spec())
    names = argument_names(given)
    return Program(_flat_call(compiled.loader), Arguments(names, len(names)), result_names=result_names(taken))


def unfit(
    metadata: Mapping[str, str], device: str, *, machine: str, cpu_flags: Collection[str], capability: str | None
) -> str | None:
    """Why a package cannot run on a device; None if nothing speaks against it.

    `metadata` are the package's AOTI_… keys, `capability` the GPU's compute capability as "90".
    """
    kind = device.partition(":")[0]
    compiled_for = metadata.get("AOTI_DEVICE_KEY", kind)
    if compiled_for != kind:
        return f"was compiled for {compiled_for}, and the instance is on {kind}: set instance_group.kind accordingly"
    own = metadata.get("AOTI_MACHINE", machine)
    if own != machine:
        return f"was compiled for {own}, this machine is {machine}"
    if kind == "cpu":
        asked = metadata.get("AOTI_CPU_ISA", "").split()
        missing = [name for name in asked if name in _CPU_FLAGS and _CPU_FLAGS[name] not in cpu_flags]
        return f"was compiled for {', '.join(missing)}, which this CPU lacks" if missing and cpu_flags else None
    wanted = metadata.get("AOTI_COMPUTE_CAPABILITY", "")
    if wanted and capability and wanted != capability:
        return f"was compiled for compute capability {wanted}, the GPU has {capability}"
    return None


def argument_names(spec: Any) -> tuple[str, ...]:
    """The name of each tensor of a call (args, kwargs), in flat order."""
    places, _ = pytree.tree_flatten_with_path(_numbered(spec))
    names = []
    for path, _ in places:
        first, *rest = path
        names.append(("ARGS", "KWARGS")[first.idx] + "".join(map(_key, rest)))
    return tuple(names)


def result_names(spec: Any) -> tuple[str, ...]:
    """The name of each tensor of a result, in flat order."""
    places, _ = pytree.tree_flatten_with_path(_numbered(spec))
    return tuple("RESULT" + "".join(map(_key, path)) for path, _ in places)


def _numbered(spec: Any) -> Any:
    return pytree.tree_unflatten(list(range(spec.num_leaves)), spec)


def _key(entry: Any) -> str:
    """`[0]` of a sequence, `[name]` of a mapping."""
    return f"[{entry.idx if hasattr(entry, 'idx') else getattr(entry, 'key', getattr(entry, 'name', entry))}]"


def _flat_call(loader: Any) -> Callable[..., Any]:
    def call(*tensors: Any) -> Sequence[Any]:
        # The library takes strides as they were compiled.
        results: Sequence[Any] = loader.boxed_run([tensor.contiguous() for tensor in tensors])
        return results

    return call


def _cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU by Linux's names; empty if unknown."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def _capability(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}"

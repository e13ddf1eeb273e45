"""The PyTorch backend of a process that takes the host for its GPU: see `fake_torch_cuda`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from modelserver_backends.pytorch import backend
from support.fake_torch_cuda import FakeGpu

GPU = "cuda:0"


@cache
def install() -> None:
    """For the rest of this process: streams, pinned memory and graphs are stand-ins, and programs are computed when
    their stream is waited for. Instances on the CPU stay as they are.
    """
    gpu = FakeGpu()
    patches: Any = SimpleNamespace(setattr=setattr)
    gpu.install(patches)
    load, prepare = backend._load, backend.prepared
    on_gpu: set[int] = set()

    def load_on_host(context: Any, path: Any, device: str | None) -> Any:
        # Programs are moved to "cpu:0" as they are to a GPU.
        program = load(context, path, "cpu:0" if device == GPU else device)
        if device == GPU:
            on_gpu.add(id(program.module))
        return program

    def prepared(program: Any, options: Any) -> Any:
        found = prepare(program, options)
        return replace(found, call=gpu.launched(found.call)) if id(program.module) in on_gpu else found

    patches.setattr(backend, "_load", load_on_host)
    patches.setattr(backend, "prepared", prepared)

"""ONNX Runtime on a GPU through our backend: parity with the CPU, truth about providers, graphs, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu.steps import Absent, require, require_gpu

MODELS = Path(__file__).parents[2] / "model_repository"
IMAGES = np.random.default_rng(0).random((4, 8, 8)).astype(np.float32)


def require_cuda_provider() -> None:
    require_gpu()
    require("onnxruntime")
    import onnxruntime
    import torch  # noqa: F401  # brings the CUDA libraries that the provider opens

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Absent("this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu")


@contextmanager
def instance_on(kind: str, *, optimization: Any = None, **parameters: str) -> Iterator[Any]:
    """An instance of the digits model on the GPU or the CPU."""
    from support.contexts import context_of, loaded

    from modelserver.backend import DeviceKind, Placement
    from modelserver.backend.discovery import find_backend

    context = context_of(MODELS / "digits_onnx")
    config = replace(context.config, parameters=parameters, optimization=optimization)
    context = replace(context, config=config, gpu_ids=(0,) if kind == "GPU" else ())
    backend = loaded(find_backend("onnxruntime"), context)
    instance: Any = backend.create_instance(Placement("i", DeviceKind[kind], 0))
    try:
        yield instance
    finally:
        instance.close()
        backend.unload()


def step_cuda_answers_as_the_cpu() -> dict[str, Any]:
    require_cuda_provider()
    with instance_on("CPU") as cpu:
        expected = cpu.run({"image": IMAGES})["probabilities"]
    with instance_on("GPU") as gpu:
        assert "CUDAExecutionProvider" in gpu._session.get_providers()
        worst = float(np.abs(gpu.run({"image": IMAGES})["probabilities"] - expected).max())
    assert worst < 1e-3, worst
    return {"largest_difference": worst}


def step_inputs_are_staged_in_pinned_memory() -> dict[str, Any]:
    require_cuda_provider()
    from modelserver_backends.onnxruntime.pinned import Staging, allocate_pinned

    memory = allocate_pinned(1 << 20)
    assert memory is not None, "cudaHostAlloc gave nothing"
    staged = Staging(allocate_pinned).stage("x", IMAGES)
    assert np.array_equal(staged, IMAGES)
    return {"bytes": int(memory.nbytes)}


def step_cuda_graphs_replay_what_was_captured() -> dict[str, Any]:
    require_cuda_provider()
    from modelserver.config.schema import ModelOptimizationPolicy, OptimizationCuda

    graphs = ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True))
    with instance_on("CPU") as cpu, instance_on("GPU", optimization=graphs) as gpu:
        for rows in (1, 4, 1, 4, 1, 4, 2):
            images = IMAGES[:rows] + rows
            difference = gpu.run({"image": images})["probabilities"] - cpu.run({"image": images})["probabilities"]
            assert float(np.abs(difference).max()) < 1e-3
        return {"graphs": len(gpu._bound._fixed)}


def step_a_provider_that_cannot_be_loaded_fails_the_load() -> dict[str, Any]:
    """TensorRT's provider without its library: the load has to fail, and must not fall to the CPU."""
    require_cuda_provider()
    import ctypes

    from modelserver.backend import ServerError
    from modelserver.config.schema import Accelerator, ExecutionAccelerators, ModelOptimizationPolicy

    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        pass
    else:
        raise Absent("libnvinfer.so.10 is here, so the provider can be loaded")
    listed = ExecutionAccelerators(gpu_execution_accelerator=(Accelerator("tensorrt", {}),))
    try:
        with instance_on("GPU", optimization=ModelOptimizationPolicy(execution_accelerators=listed)):
            pass
    except ServerError as error:
        said = error.message
    else:
        raise AssertionError("it was loaded")
    assert "GPU accelerator 'tensorrt'" not in said, "it was refused before anything was tried"
    return {"said": said}


def step_unloading_gives_memory_back() -> dict[str, Any]:
    require_cuda_provider()
    import torch

    def used() -> int:
        free, total = torch.cuda.mem_get_info(0)
        return int(total - free)

    for _ in range(3):
        with instance_on("GPU") as gpu:
            gpu.run({"image": IMAGES})
    before = used()
    for _ in range(20):
        with instance_on("GPU") as gpu:
            gpu.run({"image": IMAGES})
    grown = used() - before
    assert grown < 64 << 20, grown
    return {"grown_bytes": grown}

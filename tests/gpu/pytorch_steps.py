"""PyTorch on a GPU through our backend: every kind of file, streams, graphs, memory, and what an unload gives back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gpu.steps import DEVICE, IS_REHEARSAL, Absent, require, require_device, sized, takes

MODELS = Path(__file__).parents[2] / "model_repository"
IMAGES = np.random.default_rng(0).random((4, 8, 8)).astype(np.float32)


@contextmanager
def instances_on(
    kind: str, name: str = "digits_export", count: int = 1, *, optimization: Any = None, **parameters: str
) -> Iterator[list[Any]]:
    """Instances of a digits model on the GPU or the CPU."""
    from support.contexts import context_of, loaded

    from modelserver.backend import DeviceKind, Placement
    from modelserver.backend.discovery import find_backend

    if IS_REHEARSAL:
        from support import rehearsed_pytorch

        rehearsed_pytorch.install()
    context = context_of(MODELS / name)
    config = replace(context.config, parameters=parameters, optimization=optimization)
    backend = loaded(find_backend("pytorch"), replace(context, config=config))
    made: list[Any] = [backend.create_instance(Placement(f"i{index}", DeviceKind[kind], 0)) for index in range(count)]
    try:
        yield made
    finally:
        made.clear()
        backend.unload()


def _compare(name: str, **settings: Any) -> dict[str, Any]:
    require_device()
    with instances_on("CPU", name) as (cpu,):
        expected = _probabilities(cpu)
    with instances_on("GPU", name, **settings) as (gpu,):
        answers = [_probabilities(gpu) for _ in range(5)]
    worst = max(float(np.abs(answer - expected).max()) for answer in answers)
    assert worst < 1e-3, worst
    return {"largest_difference": worst}


def _probabilities(instance: Any) -> Any:
    """The output that has them: its name is the exported program's own, or that of the config."""
    (found,) = [array for name, array in instance.run({"image": IMAGES}).items() if name.startswith("probabilities")]
    return found


@takes(6, worth=5)
def step_torchscript_answers_as_on_the_cpu() -> dict[str, Any]:
    return _compare("digits_torchscript")


@takes(5, worth=5)
def step_an_exported_program_answers_as_on_the_cpu() -> dict[str, Any]:
    return _compare("digits_export")


@takes(3, worth=2)
def step_channels_last_answers_alike() -> dict[str, Any]:
    return _compare("digits_export", CHANNELS_LAST="true")


@takes(3, worth=5)
def step_cuda_graphs_replay_what_was_captured() -> dict[str, Any]:
    from modelserver.config.schema import ModelOptimizationPolicy, OptimizationCuda

    return _compare("digits_export", optimization=ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True)))


@takes(40, worth=3)
def step_a_compiled_program_answers_alike() -> dict[str, Any]:
    # A rehearsal has no time for a compiler.
    options = sized({}, {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}'})
    began_s = time.monotonic()
    return _compare("digits_export", TORCH_COMPILE="true", **options) | {
        "seconds": round(time.monotonic() - began_s, 1)
    }


@takes(5, worth=5)
def step_instances_have_streams_of_their_own() -> dict[str, Any]:
    """Two instances at once, a thousand times each: answers stay right, and neither sees the other's memory."""
    require_device()
    with instances_on("CPU") as (cpu,):
        expected = [cpu.run({"image": IMAGES + number})["digit"] for number in range(2)]
    wrong: list[int] = []
    num_runs = sized(1000, 20)
    with instances_on("GPU", count=2) as pair:
        assert pair[0]._lane._stream != pair[1]._lane._stream

        def run(number: int) -> None:
            right = expected[number]
            answers = (pair[number].run({"image": IMAGES + number})["digit"] for _ in range(num_runs))
            wrong.extend(number for answer in answers if not np.array_equal(answer, right))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, f"{len(wrong)} answers are wrong"
    return {"executions": 2 * num_runs}


@takes(5, worth=3)
def step_memory_does_not_grow_and_is_given_back() -> dict[str, Any]:
    require_device()
    import torch

    torch.zeros(1, device=DEVICE)
    before = torch.cuda.mem_get_info(0)[0]
    for _ in range(3):
        with instances_on("GPU") as (gpu,):
            for _ in range(sized(300, 3)):
                gpu.run({"image": IMAGES})
            held = torch.cuda.memory_reserved()
    grown = before - torch.cuda.mem_get_info(0)[0]
    # What cuDNN and cuBLAS keep for the process stays.
    assert grown < 512 << 20, grown
    return {"held_bytes": held, "kept_bytes": grown}


@takes(60, worth=4)
def step_an_inductor_package_is_served_from_a_process() -> dict[str, Any]:
    require_device()
    import torch
    from support.contexts import context_of, request_of, tensors

    from modelserver.backend import Datatype, DeviceKind, InferResponse, ModelConfig, Placement
    from modelserver.backend.discovery import find_backend
    from modelserver.config.schema import ModelInput, ModelOutput
    from modelserver.execution.process.hosted_backend import make_backend

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with TemporaryDirectory() as directory:
        path = Path(directory) / "m" / "1" / "model.pt2"
        path.parent.mkdir(parents=True)
        program = torch.export.export(Double(), (torch.ones(3, device=DEVICE),))
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except Exception as error:  # no compiler, no headers: not what this step is about
            raise Absent(f"torch cannot compile here: {error}") from error
        config = ModelConfig(
            "m",
            platform="torch_aoti",
            input=tensors(ModelInput, INPUT__0=(Datatype.FP32, (3,))),
            output=tensors(ModelOutput, OUTPUT__0=(Datatype.FP32, (3,))),
        )
        backend = make_backend(find_backend("pytorch"), context_of(path.parents[1], config=config))
        backend.load()
        instance: Any = backend.create_instance(Placement("m_0", sized(DeviceKind.GPU, DeviceKind.CPU), 0))
        try:
            (answer,) = instance.execute([request_of(INPUT__0=np.ones(3, np.float32))])
            assert isinstance(answer, InferResponse), answer
            assert answer.outputs[0].data.tolist() == [2, 2, 2]
        finally:
            instance.close()
        free = torch.cuda.mem_get_info(0)[0]
        return {"free_bytes_after": int(free)}


@takes(2, worth=2)
def step_a_model_that_does_not_fit_is_refused_before_it_is_loaded() -> dict[str, Any]:
    require_device()
    from modelserver.backend import UnavailableError

    try:
        with instances_on("GPU", memory_bytes=str(1 << 50)):
            pass
    except UnavailableError as error:
        return {"said": error.message}
    raise AssertionError("it was loaded")


@takes(2, worth=2)
def step_the_driver_tells_of_its_gpus() -> dict[str, Any]:
    require_device()
    from modelserver.telemetry.gpu import Gpus, free_gpu_bytes, gpu_families

    require(*sized(("pynvml",), ()))
    if IS_REHEARSAL:
        from support import fake_nvml

        fake_nvml.install()
    readings = Gpus().read()
    assert readings, "NVML knows no GPU"
    assert free_gpu_bytes(0), "nobody tells how much is free"
    return {"gpus": [reading.name for reading in readings], "families": len(gpu_families(readings))}

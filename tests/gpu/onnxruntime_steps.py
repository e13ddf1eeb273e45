"""ONNX Runtime on a GPU through our backend: parity with the CPU, registered memory, graphs, truth about providers."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gpu.steps import IS_REHEARSAL, Absent, require, require_device, sized, takes

MODELS = Path(__file__).parents[2] / "model_repository"
IMAGES = np.random.default_rng(0).random((4, 8, 8)).astype(np.float32)


@functools.cache
def _rehearse() -> None:
    from support import fake_onnxruntime_cuda

    fake_onnxruntime_cuda.install(setattr, on_host={"shape"})


def require_cuda_provider() -> None:
    require_device()
    require("onnxruntime")
    if IS_REHEARSAL:
        _rehearse()
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Absent("this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu")


@contextmanager
def instance_on(
    kind: str, directory: Path = MODELS / "digits_onnx", *, optimization: Any = None, **parameters: str
) -> Iterator[Any]:
    """An instance of a model on the GPU or the CPU."""
    from support.contexts import context_of, loaded

    from modelserver.backend import DeviceKind, Placement
    from modelserver.backend.discovery import find_backend

    context = context_of(directory)
    config = replace(context.config, parameters=parameters, optimization=optimization)
    context = replace(context, config=config, gpu_ids=(0,) if kind == "GPU" else ())
    backend = loaded(find_backend("onnxruntime"), context)
    instance: Any = backend.create_instance(Placement("i", DeviceKind[kind], 0))
    try:
        yield instance
    finally:
        instance.close()
        backend.unload()


def graphs() -> Any:
    from modelserver.config.schema import ModelOptimizationPolicy, OptimizationCuda

    return ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True))


@contextmanager
def registered(*arrays: np.ndarray[Any, Any]) -> Iterator[list[Any]]:
    """Copies of the arrays in memory of the GPU, as a client registers it."""
    from modelserver.platform.cuda import Cuda, DeviceArray

    if IS_REHEARSAL:
        from support.fake_torch_cuda import array_over

        copies = [array.copy() for array in arrays]
        yield [array_over(copy) for copy in copies]
        return
    import torch

    cuda, tensors = Cuda(), [torch.from_numpy(array).cuda() for array in arrays]
    torch.cuda.synchronize()
    pairs = zip(tensors, arrays, strict=True)
    yield [DeviceArray(cuda, 0, tensor.data_ptr(), array.dtype, array.shape) for tensor, array in pairs]


def difference(found: Any, expected: Any) -> float:
    worst = float(np.abs(np.asarray(found) - expected).max())
    assert worst < 1e-3, worst
    return worst


@takes(7, worth=20)
def step_cuda_answers_as_the_cpu() -> dict[str, Any]:
    require_cuda_provider()
    with instance_on("CPU") as cpu:
        expected = cpu.run({"image": IMAGES})["probabilities"]
    with instance_on("GPU") as gpu:
        assert "CUDAExecutionProvider" in gpu._session.get_providers()
        return {"largest_difference": difference(gpu.run({"image": IMAGES})["probabilities"], expected)}


@takes(2, worth=6)
def step_registered_memory_is_read_and_written_where_it_lies() -> dict[str, Any]:
    """Without graphs, while one is captured, and when it is replayed."""
    require_cuda_provider()
    from modelserver.backend import DeviceArray

    worst = 0.0
    with instance_on("CPU") as cpu:
        for optimization in (None, graphs()):
            with instance_on("GPU", optimization=optimization) as gpu:
                assert gpu.gpu == 0
                for number in range(4):
                    images = IMAGES + number
                    expected = cpu.run({"image": images})["probabilities"]
                    with registered(images, np.zeros(expected.nbytes, np.uint8)) as (given, place):
                        found = gpu.run_on_device({"image": given}, {"probabilities": place})["probabilities"]
                        assert isinstance(found, DeviceArray)
                        assert found.address == place.address
                        worst = max(worst, difference(found, expected))
    return {"largest_difference": worst}


@takes(2, worth=6)
def step_cuda_graphs_replay_what_was_captured() -> dict[str, Any]:
    require_cuda_provider()
    with instance_on("CPU") as cpu, instance_on("GPU", optimization=graphs()) as gpu:
        for rows in (1, 4, 1, 4, 1, 4, 2):
            images = IMAGES[:rows] + rows
            expected = cpu.run({"image": images})["probabilities"]
            difference(gpu.run({"image": images})["probabilities"], expected)
        assert gpu._bound._can_capture, "a capture has failed"
        captured = [fixed.has_run for _, fixed in gpu._bound._fixed.values()]
        assert captured == [True, True, False], captured
    return {"graphs": len(captured)}


@takes(1, worth=2)
def step_what_the_host_reads_belongs_to_a_graph() -> dict[str, Any]:
    require_cuda_provider()
    require("onnx")
    from onnx import TensorProto, helper
    from support.onnx_models import onnx_model, value, write_model

    nodes = [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Add", ["r", "r"], ["y"])]
    model = onnx_model([value("x", ["n"]), value("shape", [2], TensorProto.INT64)], [value("y", ["a", "b"])], nodes)
    with TemporaryDirectory() as place:
        directory = write_model(Path(place) / "m", model)
        (directory / "config.pbtxt").write_text('backend: "onnxruntime"')
        with instance_on("GPU", directory, optimization=graphs()) as gpu:
            on_host = sorted(gpu._bound._on_host)
            assert on_host == ["shape"], on_host
            for number in range(4):
                for shape in ((2, 3), (3, 2)):
                    given = np.arange(number, number + 6, dtype=np.float32)
                    found = gpu.run({"x": given, "shape": np.array(shape)})["y"]
                    assert np.array_equal(found, 2 * given.reshape(shape)), (number, shape, found)
            return {"on the host": on_host, "graphs": len(gpu._bound._fixed), "captured": gpu._bound._can_capture}


@takes(10, worth=3)
def step_captures_and_batches_of_other_models_leave_each_other_alone() -> dict[str, Any]:
    """One model captures graphs while another one gets batches of new sizes, for which it allocates."""
    require_cuda_provider()
    failures: list[BaseException] = []
    num_batches = 0
    ends = threading.Event()
    with instance_on("GPU") as other, instance_on("GPU", optimization=graphs()) as gpu:

        def disturb() -> None:
            nonlocal num_batches
            try:
                while not ends.is_set():
                    rows = 1 + (num_batches * 97) % sized(4000, 40)
                    found = other.run({"image": np.resize(IMAGES, (rows, 8, 8))})["probabilities"]
                    assert len(found) == rows
                    num_batches += 1
            except BaseException as error:
                failures.append(error)

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        try:
            for rows in range(1, 13):
                for _ in range(3):
                    gpu.run({"image": np.resize(IMAGES, (rows, 8, 8))})
        finally:
            ends.set()
            disturbing.join()
        assert not failures, failures
        assert gpu._bound._can_capture, "a capture has failed"
        num_graphs = len(gpu._bound._fixed)
    return {"graphs": num_graphs, "batches meanwhile": num_batches}


@takes(2, worth=4)
def step_batches_take_their_time() -> dict[str, Any]:
    """How long a batch takes, by way of its tensors: through the host, in registered memory, and both with graphs."""
    require_cuda_provider()
    images = np.resize(IMAGES, (sized(64, 2), 8, 8))
    took: dict[str, Any] = {}

    def measured(run: Callable[[], object]) -> str:
        times = []
        for _ in range(sized(300, 4)):
            began_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - began_s)
        return f"{median(times[len(times) // 3 :]) * 1e6:.1f} us"

    for name, optimization in (("", None), (" with graphs", graphs())):
        with (
            instance_on("GPU", optimization=optimization) as gpu,
            registered(images, np.zeros(1 << 16, np.uint8)) as (given, place),
        ):
            feeds, targets = {"image": given}, {"probabilities": place}
            took[f"host{name}"] = measured(functools.partial(gpu.run, {"image": images}))
            took[f"registered{name}"] = measured(functools.partial(gpu.run_on_device, feeds, targets))
    return {"rows": len(images), **took}


@takes(1, worth=2)
def step_inputs_are_staged_in_pinned_memory() -> dict[str, Any]:
    require_cuda_provider()
    from modelserver_backends.onnxruntime.pinned import Staging, allocate_pinned

    def allocate(num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8) if IS_REHEARSAL else allocate_pinned(num_bytes, 0)

    memory = allocate(1 << 20)
    assert memory is not None, "cudaHostAlloc gave nothing"
    staged = Staging(allocate).stage("x", IMAGES)
    assert np.array_equal(staged, IMAGES)
    return {"bytes": int(memory.nbytes)}


@takes(1, worth=2)
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


@takes(9, worth=3)
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
    for _ in range(sized(20, 2)):
        with instance_on("GPU") as gpu:
            gpu.run({"image": IMAGES})
    grown = used() - before
    assert grown < 64 << 20, grown
    return {"grown_bytes": grown}

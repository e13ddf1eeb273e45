"""Engines on a GPU, through the backend as the server uses it; each is compared with ONNX Runtime on the CPU.

The time that steps take is mostly that of building (a process each, about 10 s with TensorRT), so they share a cache of
engines. In a rehearsal `support.rehearsed_tensorrt` stands for both libraries, their plans and the device.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu.steps import IS_REHEARSAL, Absent, require, require_gpu, sized, takes
from support.engines import context_with
from support.onnx_models import write_model

from modelserver.backend import Array, BackendContext, DeviceKind, InvalidArgumentError, Placement, ServerError
from modelserver.config.defaults import normalise

ROOT = Path(__file__).parents[2]
PERCEPTRON = 'max_batch_size: 8 parameters { key: "profile.0" value { string_value: "x:1x16/4x16/8x16" } }'
TWO_PROFILES = (
    'instance_group { profile: [ "0", "1" ] } parameters { key: "profile.0" value { string_value: '
    '"x:1x1x16/2x8x16/4x16x16" } } parameters { key: "profile.1" value { string_value: "x:1x16x16/1x64x16/2x128x16" } }'
    "max_batch_size: 4"
)


def require_a_gpu() -> None:
    """In a rehearsal there is one for the rest of the process, and both libraries."""
    if IS_REHEARSAL:
        from support import rehearsed_tensorrt

        rehearsed_tensorrt.install()
    else:
        require_gpu()


def require_library(name: str) -> None:
    require_a_gpu()
    require("onnx", "onnxruntime")
    require_either(name)
    if name == "tensorrt_rtx":
        require_supported_gpu()


def require_either(name: str) -> None:
    """The library, or its bindings alone: a wheelhouse has no package in front of them, as that is no wheel."""
    try:
        require(name)
    except Absent:
        require(f"{name}_bindings")


def require_supported_gpu() -> None:
    """TensorRT for RTX refuses GPUs that are not in its list; then there is nothing to try but the refusal."""
    refused = refusal()
    if refused is not None:
        assert "does not support this GPU" in refused or "cannot run" in refused, refused
        raise Absent(f"TensorRT for RTX refuses this GPU, and the backend says so: {refused}")


@functools.cache
def refusal() -> str | None:
    with loaded("tensorrt_rtx", perceptron, PERCEPTRON, only_refusal=True) as refused:
        found: str | None = refused
    return found


@functools.cache
def engine_cache() -> Any:
    """The directory of the engines of all steps, for as long as this process lives."""
    return tempfile.TemporaryDirectory(prefix="modelserver-engines-")


@functools.cache
def models() -> Any:
    """The models of the tests that build without a GPU."""
    from importlib import util

    path = ROOT / "tests/backends/tensorrt/test_rtx_builds.py"
    spec = util.spec_from_file_location("rtx_models", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def perceptron() -> Any:
    return models().perceptron()


def attention() -> Any:
    return models().attention()


def reshaping() -> Any:
    return models().reshaping()


def quantized() -> Any:
    return models().quantized()


def wide() -> Any:
    """Weights of 4 MiB, of which some can be streamed."""
    from onnx import helper
    from support.onnx_models import onnx_model, value

    model = onnx_model(
        [value("x", ["n", 1024])], [value("y", ["n", 1024])], [helper.make_node("MatMul", ["x", "w"], ["y"])]
    )
    return models().with_weights(model, models().weight("w", 1024, 1024))


def nonzero() -> Any:
    from onnx import TensorProto, helper
    from support.onnx_models import onnx_model, value

    node = helper.make_node("NonZero", ["x"], ["y"])
    return onnx_model([value("x", [16])], [value("y", [1, None], TensorProto.INT64)], [node])


@contextmanager
def loaded(
    runtime: str, make: Callable[[], Any], text: str, *, count: int = 1, only_refusal: bool = False, cache: str = ""
) -> Iterator[Any]:
    """Instances of a model, its config completed; or only why it does not load, None if it does."""
    from modelserver_backends.tensorrt.backend import TensorRTBackend

    with tempfile.TemporaryDirectory(prefix="modelserver-gpu-") as scratch:
        directory = write_model(Path(scratch) / "m", make())
        text = f'{text} parameters {{ key: "runtime" value {{ string_value: "{runtime}" }} }}'
        options = {"engine-cache-dir": cache or engine_cache().name}
        context = completed(TensorRTBackend, context_with(text, directory, options=options))
        backend = TensorRTBackend(context)
        instances: list[Any] = []
        try:
            try:
                backend.load()
                group = context.config.instance_group[0].name
                for index in range(count):
                    place = Placement(f"{group}_{index}_0", DeviceKind.GPU, 0, index)
                    instances.append(backend.create_instance(place))
            except ServerError as error:
                if not only_refusal:
                    raise
                yield error.message
                return
            yield None if only_refusal else (backend, instances)
        finally:
            for instance in instances:
                instance.close()
            backend.unload()


def completed(backend_class: Any, context: BackendContext) -> BackendContext:
    config = backend_class.complete_config(context)
    return replace(context, config=normalise(config, model_name="m", supports_gpu=True, gpu_ids=(0,)))


@functools.cache
def session_of(make: Callable[[], Any]) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(make().SerializeToString(), providers=["CPUExecutionProvider"])


def expected(make: Callable[[], Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    session = session_of(make)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def compare(actual: Mapping[str, Array], wanted: Mapping[str, Array], tolerance: float) -> float:
    largest = 0.0
    for name, array in wanted.items():
        assert actual[name].shape == array.shape, (name, actual[name].shape, array.shape)
        assert actual[name].dtype == array.dtype, (name, actual[name].dtype)
        difference = float(np.max(np.abs(actual[name].astype(np.float64) - array.astype(np.float64)), initial=0.0))
        assert difference <= tolerance, (name, difference)
        largest = max(largest, difference)
    return largest


def random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).random(shape).astype(np.float32)


def parity(runtime: str, make: Callable[[], Any], text: str, batches: list[dict[str, Array]], tolerance: float) -> Any:
    require_library(runtime)
    largest = 0.0
    exact = f'{text} parameters {{ key: "tf32" value {{ string_value: "false" }} }}'
    with loaded(runtime, make, exact) as (_, (instance,)):
        for inputs in batches:
            largest = max(largest, compare(instance.run(inputs), expected(make, inputs), tolerance))
    return {"largest_difference": largest}


def batches_of(make: Callable[[], Any]) -> list[dict[str, Array]]:
    if make is attention:
        return [{"x": random(rows, size, 16)} for rows, size in ((1, 1), (4, 16), (2, 100), (1, 128), (3, 7))]
    return [{"x": random(rows, 16)} for rows in (1, 8, 3, 5, 1)]


@takes(8, worth=10)
def step_rtx_parity_fp32() -> dict[str, Any]:
    return parity("tensorrt_rtx", perceptron, PERCEPTRON, batches_of(perceptron), 1e-3)


@takes(12, worth=24)
def step_tensorrt_parity_fp32() -> dict[str, Any]:
    return parity("tensorrt", perceptron, PERCEPTRON, batches_of(perceptron), 1e-3)


def graphs(runtime: str) -> dict[str, Any]:
    text = f"{PERCEPTRON} dynamic_batching {{ }} optimization {{ cuda {{ graphs: true }} }}"
    require_library(runtime)
    with loaded(runtime, perceptron, text) as (_, (instance,)):
        for inputs in batches_of(perceptron) * 3:
            compare(instance.run(inputs), expected(perceptron, inputs), 1e-2)
        counts = {one.name: one.value for one in instance.measure()}
    if runtime == "tensorrt":
        assert counts["modelserver_tensorrt_graph_replays"] == 9, counts  # of 1 row and of 8
    return counts


@takes(10, worth=6)
def step_tensorrt_graphs() -> dict[str, Any]:
    return graphs("tensorrt")


@takes(6, worth=3)
def step_rtx_graphs() -> dict[str, Any]:
    return graphs("tensorrt_rtx")


@takes(12, worth=4)
def step_tensorrt_parity_of_two_profiles() -> dict[str, Any]:
    return parity("tensorrt", attention, TWO_PROFILES, batches_of(attention), 1e-3)


@takes(6, worth=2)
def step_rtx_parity_of_two_profiles() -> dict[str, Any]:
    return parity("tensorrt_rtx", attention, TWO_PROFILES, batches_of(attention), 1e-3)


@takes(10, worth=3)
def step_tensorrt_data_dependent_output() -> dict[str, Any]:
    batches = [{"x": (np.arange(16) % step == 0).astype(np.float32)} for step in (1, 2, 5)]
    batches.append({"x": np.zeros(16, np.float32)})
    return parity("tensorrt", nonzero, "", batches, 0)


def shape_tensor(runtime: str) -> dict[str, Any]:
    require_library(runtime)
    text = (
        'input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }, '
        '{ name: "shape" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true } ] '
        'output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] } ] '
        'parameters { key: "profile.0" value { string_value: "x:4/8/16,shape:1x1/2x4/4x16" } }'
    )
    with loaded(runtime, reshaping, text) as (_, (instance,)):
        inputs = {"x": random(8), "shape": np.array([2, 4], np.int64)}
        largest = compare(instance.run(inputs), expected(reshaping, inputs), 0)
        try:
            instance.run({**inputs, "shape": np.array([2, 17], np.int64)})
        except InvalidArgumentError as error:
            return {"largest_difference": largest, "refused": error.message}
    raise AssertionError("a value outside of the profile was taken")


@takes(10, worth=3)
def step_tensorrt_shape_tensor() -> dict[str, Any]:
    return shape_tensor("tensorrt")


@takes(6, worth=1)
def step_rtx_shape_tensor() -> dict[str, Any]:
    return shape_tensor("tensorrt_rtx")


@takes(10, worth=3)
def step_tensorrt_output_copy_stream() -> dict[str, Any]:
    text = f"{PERCEPTRON} optimization {{ cuda {{ output_copy_stream: true busy_wait_events: true }} }}"
    return parity("tensorrt", perceptron, text, batches_of(perceptron) * 10, 1e-3)


def two_instances(runtime: str) -> dict[str, Any]:
    require_library(runtime)
    failures: list[BaseException] = []

    def work(instance: Any) -> None:
        try:
            for inputs in batches_of(perceptron) * sized(40, 4):
                compare(instance.run(inputs), expected(perceptron, inputs), 1e-2)
        except BaseException as error:
            failures.append(error)

    with loaded(runtime, perceptron, PERCEPTRON, count=2) as (_, instances):
        threads = [threading.Thread(target=work, args=(instance,)) for instance in instances]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures
    return {}


@takes(3, worth=1)
def step_tensorrt_two_instances() -> dict[str, Any]:
    return two_instances("tensorrt")


@takes(3, worth=1)
def step_rtx_two_instances() -> dict[str, Any]:
    return two_instances("tensorrt_rtx")


@takes(15, worth=5)
def step_the_example_is_served() -> dict[str, Any]:
    require_a_gpu()
    require("tritonclient", "onnxruntime")
    try:
        require_either("tensorrt")
    except Absent:
        require_library("tensorrt_rtx")
    import tritonclient.http as httpclient
    from support.serving import running_server

    with tempfile.TemporaryDirectory(prefix="modelserver-gpu-") as repository:
        for name in ("digits_tensorrt", "digits_onnx"):
            shutil.copytree(ROOT / "model_repository" / name, Path(repository, name))
        with running_server(repository) as server:
            client = httpclient.InferenceServerClient(server.http_url, network_timeout=600, connection_timeout=600)
            image = random(3, 8, 8)
            given = httpclient.InferInput("image", list(image.shape), "FP32")
            given.set_data_from_numpy(image)
            answers = [client.infer(name, [given]) for name in ("digits_tensorrt", "digits_onnx")]
            ours, theirs = (answer.as_numpy("probabilities") for answer in answers)
            client.close()
    assert np.allclose(ours, theirs, atol=1e-2), np.abs(ours - theirs).max()
    return {"largest_difference": float(np.abs(ours - theirs).max())}


def memory_after_unload(runtime: str) -> dict[str, Any]:
    require_library(runtime)
    import torch

    free = []
    for _ in range(6):
        with loaded(runtime, attention, TWO_PROFILES) as (_, (instance,)):
            instance.run(batches_of(attention)[0])
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[-1] < 8 * 2**20, free
    return {"free_bytes": free}


@takes(15, worth=4)
def step_tensorrt_memory_after_unload() -> dict[str, Any]:
    return memory_after_unload("tensorrt")


@takes(12, worth=2)
def step_rtx_memory_after_unload() -> dict[str, Any]:
    return memory_after_unload("tensorrt_rtx")


@takes(10, worth=3)
def step_tensorrt_parity_fp16() -> dict[str, Any]:
    text = f'{PERCEPTRON} parameters {{ key: "precision" value {{ string_value: "fp16" }} }}'
    return parity("tensorrt", perceptron, text, batches_of(perceptron), 1e-2)


@takes(6, worth=1)
def step_rtx_parity_fp16() -> dict[str, Any]:
    text = f'{PERCEPTRON} parameters {{ key: "precision" value {{ string_value: "fp16" }} }}'
    return parity("tensorrt_rtx", perceptron, text, batches_of(perceptron), 1e-2)


@takes(10, worth=3)
def step_tensorrt_parity_int8() -> dict[str, Any]:
    return parity("tensorrt", quantized, PERCEPTRON, batches_of(quantized), 0.1)


@takes(10, worth=3)
def step_tensorrt_stripped_weights() -> dict[str, Any]:
    """They come back from the ONNX file, in the precision of the engine."""
    text = (
        f'{PERCEPTRON} parameters {{ key: "weights" value {{ string_value: "strip" }} }} '
        'parameters { key: "precision" value { string_value: "fp16" } }'
    )
    return parity("tensorrt", perceptron, text, batches_of(perceptron), 1e-2)


@takes(10, worth=3)
def step_tensorrt_streamed_weights() -> dict[str, Any]:
    text = (
        'max_batch_size: 8 parameters { key: "profile.0" value { string_value: "x:1x1024/4x1024/8x1024" } } '
        'parameters { key: "weight_streaming_budget" value { string_value: "0" } }'
    )
    return parity("tensorrt", wide, text, [{"x": random(rows, 1024)} for rows in (1, 8, 3)], 1e-2)


@takes(10, worth=2)
def step_rtx_kernels_are_kept() -> dict[str, Any]:
    require_library("tensorrt_rtx")
    with tempfile.TemporaryDirectory(prefix="modelserver-engines-") as cache:
        with loaded("tensorrt_rtx", perceptron, PERCEPTRON, cache=cache) as (_, (instance,)):
            instance.run(batches_of(perceptron)[0])
        (kept,) = Path(cache).glob("*.rtcache")
        num_bytes = kept.stat().st_size
        with loaded("tensorrt_rtx", perceptron, PERCEPTRON, cache=cache) as (_, (instance,)):
            compare(instance.run(batches_of(perceptron)[0]), expected(perceptron, batches_of(perceptron)[0]), 1e-2)
    return {"bytes": num_bytes}

"""Which execution providers a config gets on which placement, and that no other is taken in silence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from modelserver_backends.onnxruntime import providers
from modelserver_backends.onnxruntime.providers import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    available_providers,
    check_gpu_wish,
    check_session,
    nodes_by_provider,
    wanted_providers,
)
from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as native
from onnxruntime.capi.onnxruntime_inference_collection import OrtValue
from support import fake_onnxruntime_cuda
from support.contexts import context_of, instance_of, loaded
from support.onnx_models import identity_model

from modelserver.backend import BackendContext, ConfigError, DeviceKind, ModelConfig, Placement, UnavailableError
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import (
    Accelerator,
    ExecutionAccelerators,
    InstanceGroupKind,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    OptimizationCuda,
)
from modelserver.errors import ServerError
from modelserver.repository.definition import read_definition
from modelserver.repository.layout import scan_model
from modelserver.repository.options import DefinitionOptions

ON_CPU = Placement("cpu")
ON_GPU = Placement("gpu", DeviceKind.GPU, 1)
FALLBACK = {"allow_cpu_fallback": "true"}


def context(*, optimization: ModelOptimizationPolicy | None = None, **parameters: str) -> BackendContext:
    return context_of(Path("/models/m"), config=ModelConfig(parameters=parameters, optimization=optimization))


def accelerators(kind: str, name: str, **parameters: str) -> ModelOptimizationPolicy:
    listed = ExecutionAccelerators(**{f"{kind}_execution_accelerator": (Accelerator(name, parameters),)})
    return ModelOptimizationPolicy(execution_accelerators=listed)


def accelerated(kind: str, name: str, **parameters: str) -> BackendContext:
    return context(optimization=accelerators(kind, name, **parameters))


def test_a_cpu_runs_on_the_cpu() -> None:
    assert wanted_providers(context(), ON_CPU) == []
    assert available_providers(context(), [], [CPU], "1") == [(CPU, {})]


def test_a_gpu_wants_cuda_with_the_models_parameters() -> None:
    given = context(gpu_mem_limit="1000", cudnn_conv_algo_search="1", arena_extend_strategy="1", other="x")
    options = {
        "gpu_mem_limit": "1000",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "device_id": "1",
    }
    assert wanted_providers(given, ON_GPU) == [(CUDA, options)]


def test_an_accelerators_parameters_are_handed_on() -> None:
    ((name, options),) = wanted_providers(accelerated("gpu", "cuda", use_tf32="0", cudnn_conv_algo_search="0"), ON_GPU)
    assert (name, options) == (
        CUDA,
        {"use_tf32": "0", "cudnn_conv_algo_search": "EXHAUSTIVE", "device_id": "1"},
    )


def test_the_rtx_plugin_goes_without_cuda() -> None:
    assert wanted_providers(accelerated("gpu", "tensorrt_rtx"), ON_GPU) == [(TENSORRT_RTX, {"device_id": "1"})]
    with pytest.raises(UnavailableError, match=r"name it with instance_group \[ { kind: KIND_GPU } \], or allow"):
        check_gpu_wish(accelerated("gpu", "tensorrt_rtx"), has_gpu=False)
    both = ExecutionAccelerators(gpu_execution_accelerator=(Accelerator("cuda", {}), Accelerator("tensorrt_rtx", {})))
    with pytest.raises(ConfigError, match="expected the accelerator 'tensorrt_rtx' alone"):
        wanted_providers(context(optimization=ModelOptimizationPolicy(execution_accelerators=both)), ON_GPU)


def test_a_plugin_gets_the_instances_device_and_options_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options take a provider once, and a list of providers would take the place of theirs."""
    real, given = onnxruntime.InferenceSession, []

    class Options(onnxruntime.SessionOptions):
        devices: Sequence[str] = ()

        def add_provider_for_devices(self, devices: Sequence[Any], settings: Mapping[str, str]) -> None:
            assert not self.devices, "Provider has already been registered."
            self.devices = [device.name for device in devices]
            assert settings["device_id"] == self.devices[0][-1]

    def new_session(path: Any, options: Any, providers: Any = None, enable_fallback: int = 1) -> Any:
        session = real(path, options, providers=[CPU], enable_fallback=enable_fallback)
        if providers is None:
            given.append(options.devices)
            monkeypatch.setattr(session, "get_providers", lambda: [TENSORRT_RTX, CPU])
        return session

    plugin = ModuleType("onnxruntime_ep_nv_tensorrt_rtx")
    plugin.__spec__ = ModuleSpec(plugin.__name__, None)
    plugin.__dict__.update(get_ep_name=lambda: TENSORRT_RTX, get_library_path=lambda: "/rtx.so")
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    for name, fake in (
        ("InferenceSession", new_session),
        ("SessionOptions", Options),
        ("register_execution_provider_library", lambda _name, _path: None),
        ("get_ep_devices", lambda: [SimpleNamespace(ep_name=TENSORRT_RTX, name=f"gpu{number}") for number in (0, 1)]),
    ):
        monkeypatch.setattr(onnxruntime, name, fake)
    model = context_of(identity_model(tmp_path / "m", ["n", 2]))
    group = ModelInstanceGroup(kind=InstanceGroupKind.KIND_GPU, gpus=(0, 1))
    config = ModelConfig(optimization=accelerators("gpu", "tensorrt_rtx"), instance_group=(group,))
    backend = loaded(find_backend("onnxruntime"), replace(model, config=config))
    for number in (0, 1):
        backend.create_instance(replace(ON_GPU, device_id=number))
    assert given == [["gpu0"], ["gpu1"]]
    monkeypatch.setattr(providers, "_registered", set())
    refuse = native.Fail("Failed to load library /rtx.so with error: libcuda.so.1")

    def register(_name: str, _path: str) -> None:
        raise refuse

    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime, "register_execution_provider_library", register)
        with pytest.raises(UnavailableError, match=r"is installed, and cannot be loaded: Failed .* libcuda\.so\.1"):
            backend.create_instance(replace(ON_GPU, device_id=2))
    with pytest.raises(UnavailableError, match=r"finds 2 devices .* there is no GPU 2 for it"):
        backend.create_instance(replace(ON_GPU, device_id=2))
    backend.unload()


def graphs_of(model_directory: Path, name: str = "") -> BackendContext:
    policy = ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True))
    if name:
        policy = accelerators("gpu", name, enable_cuda_graph="true")
    return context_of(model_directory, config=ModelConfig(optimization=policy))


@pytest.mark.parametrize("accelerator", ["", "cuda"])
def test_graphs_are_wanted_by_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
    """As an option of the provider too: a graph that runs without its number would give the first outputs for ever."""
    made = fake_onnxruntime_cuda.install(monkeypatch.setattr)
    given = replace(graphs_of(identity_model(tmp_path / "m", ["n", 2]), accelerator), gpu_ids=(0,))
    backend = loaded(find_backend("onnxruntime"), given)
    instance: Any = backend.create_instance(replace(ON_GPU, device_id=0))
    assert instance.gpu == 0
    for start in range(4):
        assert instance.run({"x": np.full((3, 2), start, np.float32)})["y"].tolist() == [[start] * 2] * 3
    assert [(session.num_captures, session.num_replays) for session in made] == [(1, 2)]
    backend.unload()


def test_runs_beside_the_graphs_capture_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of BF16 go another way than graphs, in the same session."""
    made = fake_onnxruntime_cuda.install(monkeypatch.setattr)
    given = replace(graphs_of(identity_model(tmp_path / "m", ["n", 2], TensorProto.BFLOAT16)), gpu_ids=(0,))
    backend = loaded(find_backend("onnxruntime"), given)
    instance: Any = backend.create_instance(replace(ON_GPU, device_id=0))
    monkeypatch.setattr(onnxruntime, "OrtValue", OrtValue)
    assert instance.run({"x": np.ones((1, 2), np.uint16)})["y"].tolist() == [[1, 1]]
    assert made
    backend.unload()


def test_tensorrt_without_its_libraries_is_not_the_models_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime says so before it looks at the file."""
    fake_onnxruntime_cuda.install(monkeypatch.setattr)
    given = context_of(identity_model(tmp_path / "m", ["n", 2]))
    given = replace(given, config=ModelConfig(optimization=accelerators("gpu", "tensorrt")), gpu_ids=(0,))
    with pytest.raises(UnavailableError, match=r"could not load TensorrtEx.*install TensorRT libraries"):
        loaded(find_backend("onnxruntime"), given).create_instance(replace(ON_GPU, device_id=0))
    given = replace(given, config=replace(given.config, parameters=FALLBACK))
    instance: Any = loaded(find_backend("onnxruntime"), given).create_instance(replace(ON_GPU, device_id=0))
    assert instance.run({"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[1, 1]]


def test_a_model_that_is_not_all_cudas_goes_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = fake_onnxruntime_cuda.install(monkeypatch.setattr, has_foreign_nodes=True)
    given = replace(graphs_of(identity_model(tmp_path / "m", ["n", 2])), gpu_ids=(0,))
    backend = loaded(find_backend("onnxruntime"), given)
    instance: Any = backend.create_instance(replace(ON_GPU, device_id=0))
    for start in range(3):
        assert instance.run({"x": np.full((1, 2), start, np.float32)})["y"].tolist() == [[start] * 2]
    assert made[0].num_captures == 0
    assert "its batches are run without CUDA graphs: This session cannot use the graph capture feature" in caplog.text
    backend.unload()


@pytest.mark.parametrize(
    ("groups", "parameters", "has_gpu", "is_refused"),
    [
        ((), {}, False, True),
        ((ModelInstanceGroup(count=2),), {}, False, True),
        ((), {}, True, False),
        ((ModelInstanceGroup(kind=InstanceGroupKind.KIND_CPU),), {}, False, False),
        ((), FALLBACK, False, False),
    ],
)
def test_a_wish_for_a_gpu_does_not_end_on_the_cpu(
    groups: tuple[ModelInstanceGroup, ...], parameters: dict[str, str], has_gpu: bool, is_refused: bool
) -> None:
    given = context(optimization=accelerators("gpu", "tensorrt"), **parameters)
    given = replace(given, config=replace(given.config, instance_group=groups))
    with pytest.raises(UnavailableError, match="GPU accelerator 'tensorrt'") if is_refused else nullcontext():
        check_gpu_wish(given, has_gpu=has_gpu)


@pytest.mark.tool("no-gpu")
def test_a_cpu_that_was_chosen_makes_accelerators_of_gpus_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    policy = accelerators("gpu", "cuda")
    with pytest.raises(UnavailableError, match=r"instance_group \[ \{ kind: KIND_CPU \} \]"):
        loaded(find_backend("onnxruntime"), context_of(directory, config=ModelConfig(optimization=policy)))
    group = ModelInstanceGroup(kind=InstanceGroupKind.KIND_CPU)
    config = ModelConfig(optimization=policy, instance_group=(group,))
    loaded(find_backend("onnxruntime"), context_of(directory, config=config))
    assert "no instance is on a GPU, so its GPU accelerators have no effect: cuda" in caplog.text


def test_cuda_graphs_are_cudas_own() -> None:
    given = context(optimization=ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True)))
    assert wanted_providers(given, ON_GPU) == [(CUDA, {"enable_cuda_graph": "1", "device_id": "1"})]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"precision_mode": "FP16", "max_workspace_size_bytes": "5"},
            {"trt_max_workspace_size": "5", "trt_fp16_enable": "1"},
        ),
        ({"precision_mode": "fp32"}, {}),
        (
            {"precision_mode": "BF16", "trt_engine_cache_enable": "1"},
            {"trt_bf16_enable": "1", "trt_engine_cache_enable": "1"},
        ),
        (
            {"precision_mode": "INT8", "int8_calibration_table_name": "t", "int8_use_native_calibration_table": "1"},
            {
                "trt_int8_enable": "1",
                "trt_int8_calibration_table_name": "t",
                "trt_int8_use_native_calibration_table": "1",
            },
        ),
    ],
)
def test_tensorrt_comes_before_cuda(parameters: dict[str, str], expected: dict[str, str]) -> None:
    wanted = wanted_providers(accelerated("gpu", "tensorrt", **parameters), ON_GPU)
    assert wanted == [(TENSORRT, {**expected, "device_id": "1"}), (CUDA, {"device_id": "1"})]


@pytest.mark.parametrize(
    ("kind", "name", "parameters", "message"),
    [
        ("cpu", "turbo", {}, r"expected one of cuda, tensorrt, .*, got 'turbo'"),
        ("gpu", "turbo", {}, r"expected one of cuda, tensorrt, .*, got 'turbo'"),
        ("cpu", "tensorrt", {}, "'tensorrt' needs a GPU; name it under gpu_execution_accelerator"),
        ("gpu", "tensorrt", {"precision_mode": "FP8"}, "precision_mode: expected one of FP32, .*, got 'FP8'"),
        ("gpu", "tensorrt", {"trt_cuda_graph_enable": "true"}, "or serve the model by the backend 'tensorrt'"),
        ("gpu", "tensorrt", {"trt_profile_min_shapes": "x:1"}, "or none; trt_profile_opt_shapes, .* missing"),
    ],
)
def test_a_mistake_is_named(kind: str, name: str, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wanted_providers(accelerated(kind, name, **parameters), ON_GPU)


def test_what_this_build_lacks_fails_the_load() -> None:
    wanted = [(TENSORRT, {}), (CUDA, {})]
    with pytest.raises(UnavailableError, match=r"asks for Tens.*, which ONNX Runtime 1.31 here does not have .*<11'"):
        available_providers(context(), wanted, [CUDA, CPU], "1.31")
    assert available_providers(context(**FALLBACK), wanted, [CUDA, CPU], "1.31") == [(CUDA, {}), (CPU, {})]


def test_a_session_is_not_taken_for_what_it_is_not() -> None:
    asked = [(CUDA, {}), (CPU, {})]
    assert check_session(context(), asked, [CUDA, CPU]) is None
    with pytest.raises(UnavailableError, match="could not load CUDAExecutionProvider: it made a session of CPUEx"):
        check_session(context(), asked, [CPU])
    with pytest.raises(UnavailableError, match=r"der: Failed to load libcublas.so.13; install .*gpu\[cuda,cudnn\]"):
        check_session(context(), asked, [CPU], "Failed to load libcublas.so.13")
    assert "could not load CUDA" in (check_session(context(**FALLBACK), asked, [CPU]) or "")


def test_nodes_are_counted_by_provider() -> None:
    parts = [SimpleNamespace(ep_name=name, get_nodes=lambda: [1, 2]) for name in ("a", "b", "a")]
    assert nodes_by_provider(parts) == {"a": 4, "b": 2}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_model_is_not_computed_elsewhere_in_silence(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the library that is installed here, which has neither."""
    given = context_of(identity_model(tmp_path / "m", ["n", 2]))
    placement = replace(ON_GPU, device_id=0) if kind == "gpu" else ON_CPU
    config = ModelConfig(optimization=accelerators("cpu", "openvino"))
    backend = loaded(find_backend("onnxruntime"), replace(given, config=config))
    with pytest.raises(UnavailableError, match=r"asks for (CUDA|OpenVINO)Ex.*, which ONNX Runtime .*pip install onnx"):
        backend.create_instance(placement)
    with caplog.at_level(logging.WARNING):
        instance = instance_of("onnxruntime", replace(given, config=replace(config, parameters=FALLBACK)))
    assert instance.run({"x": __import__("numpy").ones((1, 2), "float32")})["y"].tolist() == [[1, 1]]


@pytest.mark.parametrize(("gpu_ids", "is_refused"), [((), True), ((0,), False)])
def test_a_gpu_that_may_not_be_used_fulfils_no_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_ids: tuple[int, ...], is_refused: bool
) -> None:
    # As with a GPU below --min-supported-compute-capability: the machine has one, and models get none.
    monkeypatch.setattr(find_backend("onnxruntime"), "supports_gpu", True)
    directory = identity_model(tmp_path / "m", ["n", 3])
    (directory / "config.pbtxt").write_text(
        'backend: "onnxruntime" optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" } } }'
    )
    layout, options = scan_model(directory, "m"), DefinitionOptions(gpu_ids=gpu_ids)
    with pytest.raises(ServerError, match="GPU accelerator 'cuda'") if is_refused else nullcontext():
        (group,) = read_definition(layout, options).config.instance_group
        assert (group.kind, group.gpus) == (InstanceGroupKind.KIND_GPU, gpu_ids)

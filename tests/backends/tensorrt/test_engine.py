"""What is said of plans that a library refuses, how often the backend tries again, and what is asked of an engine that
is loaded, over a library that computes on the CPU.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from modelserver_backends.tensorrt import backend as backend_module
from modelserver_backends.tensorrt import runtime, verify
from modelserver_backends.tensorrt.backend import TensorRTBackend
from modelserver_backends.tensorrt.build_options import BuildOptions, BuildRequest
from modelserver_backends.tensorrt.engine import EngineSettings, _check_validity, _versions, load_engine
from modelserver_backends.tensorrt.model_build import PreparedEngine
from modelserver_backends.tensorrt.network_build import Built, build
from modelserver_backends.tensorrt.plan import Flavour, parse_header
from modelserver_backends.tensorrt.profiles import parse_profile
from onnx import helper, numpy_helper
from support import rehearsed_tensorrt
from support.cpu_tensorrt import CpuDevice, load, torch_of
from support.engines import batching_engine, context_with, plan_bytes
from support.onnx_models import identity_model, onnx_model, value

from modelserver.backend import (
    ConfigError,
    DeviceKind,
    InvalidArgumentError,
    Placement,
    UnavailableError,
    device_memory,
)

PLAN = Path("model.plan")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("10.9.0.34", "built with TensorRT 10.9.0.34, as is installed: an engine runs on the kind of GPU that it was"),
        ("11.4.0.106", "installed is 11.4.0.106: build it again on this machine with modelserver build-engine"),
    ],
)
def test_versions_are_told(installed: str, said: str) -> None:
    header = parse_header(plan_bytes(), 256, PLAN)
    assert said in _versions(header, SimpleNamespace(__version__=installed))  # type: ignore[arg-type]


def test_what_tensorrt_for_rtx_finds_wrong_is_put_into_words(caplog: pytest.LogCaptureFixture) -> None:
    trt = SimpleNamespace(EngineValidity=SimpleNamespace(INVALID="invalid"), __version__="1.7")

    def check(validity: str, found: int) -> None:
        runtime = SimpleNamespace(engine_header_size=64, get_engine_validity=lambda head: (validity, found))
        _check_validity(trt, runtime, plan_bytes("tensorrt_rtx"), PLAN)

    check("valid", 0)
    check("invalid", 0)  # as it says without a driver
    assert not caplog.text
    with pytest.raises(
        InvalidArgumentError, match="does not support this GPU's architecture, the NVIDIA driver is too"
    ):
        check("invalid", 2 | 4)
    check("suboptimal", 1)
    assert "it was built with another version" in caplog.text


class Device(CpuDevice):
    compute_capability = "9.0"

    def __init__(self, device_id: int) -> None:
        super().__init__()

    def free_bytes(self) -> int:
        return 2**40


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Of preparing, forgetting and loading; the first so many loads fail."""
    counts: dict[str, Any] = {"prepared": 0, "forgotten": 0, "failing": 0, "info": batching_engine(8, 3)}
    plan = tmp_path / "cached.plan"
    plan.write_bytes(plan_bytes())

    def forget() -> None:
        counts["forgotten"] += 1

    def prepare(*arguments: Any) -> PreparedEngine:
        counts["prepared"] += 1
        return PreparedEngine(plan, None, forget)

    def load_plan(*arguments: Any, **details: Any) -> Any:
        counts["failing"] -= 1
        if counts["failing"] >= 0:
            raise InvalidArgumentError("unable to create TensorRT engine: it is of another time")
        return load(counts["info"], lambda inputs: {"out": inputs["in"] * 2})

    monkeypatch.setattr(backend_module, "Device", Device)
    monkeypatch.setattr(backend_module, "prepare_engine", prepare)
    monkeypatch.setattr(backend_module, "load_engine", load_plan)
    return counts


def made(tmp_path: Path, text: str = "") -> TensorRTBackend:
    io = (
        'max_batch_size: 8 input [ { name: "in" data_type: TYPE_FP32 dims: [ 3 ] } ] '
        'output [ { name: "out" data_type: TYPE_FP32 dims: [ 3 ] } ]'
    )
    return TensorRTBackend(context_with(f"{io} {text}", identity_model(tmp_path / "m", ["n", 3])))


def place(backend: TensorRTBackend) -> Any:
    return backend.create_instance(Placement("m_0_0", DeviceKind.GPU, 0, 0))


def test_an_engine_of_the_cache_that_does_not_load_is_built_once_more(tmp_path: Path, attempts: dict[str, Any]) -> None:
    attempts["failing"] = 1
    before = device_memory("cuda:9").reserved_bytes  # of others in this process
    backend = made(tmp_path)
    instance = place(backend)
    assert (attempts["prepared"], attempts["forgotten"]) == (2, 1)
    other = place(backend)  # another instance on the same device: no other engine, and contexts of its own
    assert attempts["prepared"] == 2
    assert device_memory("cuda:9").reserved_bytes == before + 256 + 2 * 64
    instance.close()
    other.close()
    backend.unload()
    assert device_memory("cuda:9").reserved_bytes == before


def test_one_that_never_loads_is_an_error(tmp_path: Path, attempts: dict[str, Any]) -> None:
    attempts["failing"] = 9
    before = device_memory("cuda:9").reserved_bytes
    with pytest.raises(InvalidArgumentError, match="it is of another time"):
        place(made(tmp_path))
    assert attempts["prepared"] == 2
    assert device_memory("cuda:9").reserved_bytes == before


def test_a_plan_of_somebody_else_is_not_tried_twice(tmp_path: Path, attempts: dict[str, Any]) -> None:
    attempts["failing"] = 1
    backend = made(tmp_path)
    (tmp_path / "m/1/model.plan").write_bytes(plan_bytes())
    with pytest.raises(InvalidArgumentError, match="it is of another time"):
        place(backend)
    assert (attempts["prepared"], attempts["forgotten"]) == (0, 0)


def test_the_engine_has_the_last_word_on_the_config(tmp_path: Path, attempts: dict[str, Any]) -> None:
    attempts["info"] = batching_engine(4, 3)
    with pytest.raises(ConfigError, match="expected at most 4"):
        place(made(tmp_path))
    attempts["info"] = batching_engine(8, 3)
    with pytest.raises(ConfigError, match=r"profile 7\[7\]"):
        place(made(tmp_path, 'instance_group [ { name: "m" profile: [ "7" ] } ]'))


class RehearsedDevice(CpuDevice):
    def __init__(self, device_id: int = 0) -> None:
        super().__init__()
        self.gpu = rehearsed_tensorrt.GPU
        self.torch = torch_of(self.gpu)


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library that builds, loads and runs."""
    module = ModuleType("tensorrt")
    vars(module).update(rehearsed_tensorrt.library("tensorrt"))
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(runtime, "_loggers", {})
    monkeypatch.setattr(runtime, "_initialised", set())
    monkeypatch.setattr(verify, "Device", RehearsedDevice)
    monkeypatch.setattr(verify, "find_problem", lambda: "")
    return module


def built(tmp_path: Path, options: BuildOptions) -> tuple[Path, Path, Built]:
    """An ONNX file, its plan, and what is said of it."""
    model = onnx_model([value("x", ["n", 4])], [value("y", ["n", 4])], [helper.make_node("MatMul", ["x", "w"], ["y"])])
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32) / 3, "w"))
    onnx, plan = tmp_path / "model.onnx", tmp_path / "model.plan"
    onnx.write_bytes(model.SerializeToString())
    profiles = (parse_profile("x:1x4/2x4/4x4", "profile"),)
    return onnx, plan, build(BuildRequest(str(onnx), str(plan), Flavour.TENSORRT, profiles, options), lambda *_: None)


@pytest.mark.parametrize("precision", ["keep", "fp16"])
def test_weights_are_put_back_in_the_precision_of_the_engine(
    tmp_path: Path, tensorrt: ModuleType, precision: str
) -> None:
    options = BuildOptions(weights="strip", precision=precision)
    onnx, plan, made = built(tmp_path, options)
    differences = verify.verify(onnx, plan, made.info, options=options, num_samples=2)
    assert [one.what for one in differences] == [*(["ONNX fp16"] if precision == "fp16" else []), "engine"]
    assert max(one.max_abs for one in differences) < 1e-3
    other = "fp16" if precision == "keep" else "keep"
    with pytest.raises(InvalidArgumentError, match="do not fit the engine: the refit weights have another type"):
        load_engine(plan, RehearsedDevice(), EngineSettings(refit_onnx=onnx, precision=other), name="m")


def test_a_budget_that_tensorrt_refuses_is_an_error(tmp_path: Path, tensorrt: ModuleType) -> None:
    """Its answer is lost in the binding."""
    _, plan, _ = built(tmp_path, BuildOptions(weight_streaming=True))
    loaded = load_engine(plan, RehearsedDevice(), EngineSettings(weight_streaming_bytes=16), name="m")
    assert loaded.engine.weight_streaming_budget_v2 == 16
    with pytest.raises(InvalidArgumentError, match="refuses -1 bytes: the weight streaming budget cannot be set"):
        load_engine(plan, RehearsedDevice(), EngineSettings(weight_streaming_bytes=-1), name="m")


def test_an_engine_goes_while_its_device_is_the_current_one(tmp_path: Path, tensorrt: ModuleType) -> None:
    loaded = load_engine(built(tmp_path, BuildOptions())[1], RehearsedDevice(), EngineSettings(), name="m")
    was_active: list[bool] = []
    weakref.finalize(loaded.engine, lambda: was_active.append(rehearsed_tensorrt.GPU.is_active))
    loaded.close()
    assert was_active == [True]


def test_a_library_that_makes_no_runtime_is_an_error(
    tmp_path: Path, tensorrt: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan, _ = built(tmp_path, BuildOptions())

    def fail(_logger: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(tensorrt, "Runtime", fail)
    with pytest.raises(UnavailableError, match="TensorRT could not make a runtime: TensorRT says nothing"):
        load_engine(plan, RehearsedDevice(), EngineSettings(), name="m")


def test_damaged_timings_of_earlier_builds_are_replaced(tmp_path: Path, tensorrt: ModuleType) -> None:
    timings = tmp_path / "timings"
    timings.write_bytes(b"damaged")
    built(tmp_path, BuildOptions(timing_cache=str(timings)))
    assert timings.read_bytes() == b"timings"

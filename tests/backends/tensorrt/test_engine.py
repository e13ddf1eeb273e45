"""What is said of plans that a library refuses, and how often the backend tries again, without a library."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modelserver_backends.tensorrt import backend as backend_module
from modelserver_backends.tensorrt.backend import TensorRTBackend
from modelserver_backends.tensorrt.engine import _check_validity, _versions
from modelserver_backends.tensorrt.model_build import PreparedEngine
from modelserver_backends.tensorrt.plan import parse_header
from support.cpu_tensorrt import CpuDevice, load
from support.engines import batching_engine, context_with, plan_bytes
from support.onnx_models import identity_model

from modelserver.backend import ConfigError, DeviceKind, InvalidArgumentError, Placement, device_memory

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

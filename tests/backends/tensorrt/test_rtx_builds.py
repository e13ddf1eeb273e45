"""Real engines, built by TensorRT for RTX, which needs no GPU to build: `pip install tensorrt_rtx_cu13`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from modelserver_backends.tensorrt.build_options import BuildOptions, BuildRequest
from modelserver_backends.tensorrt.builder import build_engine
from modelserver_backends.tensorrt.engine_cache import EngineCache
from modelserver_backends.tensorrt.engine_info import EngineInfo
from modelserver_backends.tensorrt.network_build import BuildFailedError, UnsupportedNodesError, build
from modelserver_backends.tensorrt.plan import Flavour, read_header
from modelserver_backends.tensorrt.profiles import parse_profile
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import onnx_model, value, write_model

from modelserver.backend import (
    Datatype,
    InternalError,
    InvalidArgumentError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)

pytestmark = pytest.mark.tool("tensorrt_rtx")


def request_for(path: Path, *profiles: str, **options: Any) -> BuildRequest:
    parsed = tuple(parse_profile(profile, "profile") for profile in profiles)
    return BuildRequest(str(path), str(path.with_suffix(".plan")), Flavour.RTX, parsed, BuildOptions(**options))


def saved(tmp_path: Path, model: onnx.ModelProto) -> Path:
    return write_model(tmp_path / "m", model) / "1" / "model.onnx"


def weight(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    generator = np.random.default_rng(seed)
    return numpy_helper.from_array((generator.random(shape) - 0.5).astype(np.float32), name)


def with_weights(model: onnx.ModelProto, *weights: onnx.TensorProto) -> onnx.ModelProto:
    model.graph.initializer.extend(weights)
    return model


def perceptron() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    return with_weights(onnx_model([value("x", ["n", 16])], [value("y", ["n", 8])], nodes), weight("w", 16, 8))


def convolution() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Add", ["r", "x"], ["s"]),
        helper.make_node("GlobalAveragePool", ["s"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    model = onnx_model([value("x", ["n", 4, "h", "w"])], [value("y", ["n", 4])], nodes)
    return with_weights(model, weight("k", 4, 4, 3, 3))


def attention() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"]),
        helper.make_node("Transpose", ["q"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["a"]),
        helper.make_node("Softmax", ["a"], ["p"]),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    model = onnx_model([value("x", ["n", "seq", 16])], [value("y", ["n", "seq", 16])], nodes)
    return with_weights(model, weight("w", 16, 16))


def reshaping() -> onnx.ModelProto:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    inputs = [value("x", ["n"]), value("shape", [2], TensorProto.INT64)]
    return onnx_model(inputs, [value("y", [None, None])], [node])


def integers() -> onnx.ModelProto:
    inputs = [value("a", [4], TensorProto.INT64), value("b", [4], TensorProto.INT64)]
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Equal", ["a", "b"], ["same"])]
    outputs = [value("sum", [4], TensorProto.INT64), value("same", [4], TensorProto.BOOL)]
    return onnx_model(inputs, outputs, nodes)


def quantized() -> onnx.ModelProto:
    """A product of 8-bit integers, as quantizers write it: quantize, dequantize, multiply."""
    scales = [
        numpy_helper.from_array(np.float32(0.05), "sx"),
        numpy_helper.from_array(np.float32(0.01), "sw"),
        numpy_helper.from_array(np.int8(0), "zero"),
        numpy_helper.from_array(np.arange(-64, 64, dtype=np.int8).reshape(16, 8), "wq"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "sx", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["wq", "sw", "zero"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    return with_weights(onnx_model([value("x", ["n", 16])], [value("y", ["n", 8])], nodes), *scales)


@pytest.mark.parametrize(
    ("make", "profiles", "options", "shapes"),
    [
        (perceptron, ["x:1x16/4x16/8x16"], {}, {"x": (-1, 16), "y": (-1, 8)}),
        (perceptron, ["x:1x16/4x16/8x16"], {"precision": "fp16"}, {"x": (-1, 16), "y": (-1, 8)}),
        (quantized, ["x:1x16/4x16/8x16"], {}, {"x": (-1, 16), "y": (-1, 8)}),
        (convolution, ["x:1x4x8x8/2x4x16x16/4x4x32x32"], {"tf32": False}, {"x": (-1, 4, -1, -1), "y": (-1, 4)}),
        (attention, ["x:1x1x16/2x8x16/4x16x16", "x:1x16x16/1x64x16/2x128x16"], {}, {"x": (-1, -1, 16)}),
        (reshaping, ["x:4/8/16,shape:1x1/2x4/4x16"], {}, {"x": (-1,), "shape": (2,), "y": (-1, -1)}),
        (integers, [], {}, {"a": (4,), "sum": (4,), "same": (4,)}),
        (perceptron, ["x:8x16"], {"targets": ("sm86", "sm120"), "weight_streaming": True}, {"x": (-1, 16)}),
    ],
    ids=lambda it: it.__name__ if callable(it) else "",
)
def test_models_become_engines(
    tmp_path: Path, make: Any, profiles: Sequence[str], options: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    told: list[float] = []
    request = request_for(saved(tmp_path, make()), *profiles, **options)
    result = build_engine(request, tell=lambda phase, fraction: told.append(fraction), timeout_s=100)
    header = read_header(Path(request.plan))
    assert (header.flavour, header.size_bytes) == (Flavour.RTX, result.num_bytes)
    assert header.version_text == result.library_version
    found = {tensor.name: tensor.dims for tensor in result.info.tensors}
    assert {name: found[name] for name in shapes} == shapes
    assert len(result.info.profiles) == max(1, len(profiles))
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert result.peak_memory_bytes > 2**20
    if "targets" in options:
        assert header.architectures == options["targets"]


def info_of(tmp_path: Path, make: Any, *profiles: str) -> EngineInfo:
    return build_engine(request_for(saved(tmp_path, make()), *profiles)).info


def test_what_is_said_of_an_engine_is_its_datatypes_and_shape_tensors(tmp_path: Path) -> None:
    info = info_of(tmp_path, reshaping, "x:4/8/16,shape:1x1/2x4/4x16")
    assert {tensor.name for tensor in info.tensors if tensor.is_shape_tensor} == {"shape"}
    assert info.profiles[0]["shape"].max == (4, 16)
    kinds = {tensor.name: tensor.datatype.value for tensor in info_of(tmp_path, integers).tensors}
    assert kinds == {"a": "INT64", "b": "INT64", "sum": "INT64", "same": "BOOL"}


def test_weights_in_a_file_beside_it_are_found(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = with_weights(perceptron(), weight("unused", 64, 64))
    model.graph.initializer[0].CopyFrom(weight("w", 16, 8))
    onnx.save_model(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    result = build_engine(request_for(path, "x:1x16/4x16/8x16"))
    assert result.num_bytes > 1000


def test_every_node_that_is_not_supported_is_listed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["d"], name="first"),
        helper.make_node("Nobody", ["x"], ["e"], name="second", domain="here"),
        helper.make_node("Add", ["d", "e"], ["y"], name="third"),
    ]
    model = onnx_model([value("x", [3, 3])], [value("y", [])], nodes)
    model.opset_import.append(helper.make_opsetid("here", 1))
    with pytest.raises(UnsupportedNodesError) as raised:
        build_engine(request_for(saved(tmp_path, model)))
    assert {(node.name, node.op) for node in raised.value.nodes} >= {("first", "Det"), ("second", "Nobody")}
    assert "does not support" in raised.value.message
    assert not (tmp_path / "m/1/model.plan").exists()


def double() -> onnx.ModelProto:
    return onnx_model([value("x", [3], TensorProto.DOUBLE)], [value("y", [3], TensorProto.DOUBLE)])


def strings() -> onnx.ModelProto:
    return onnx_model([value("x", [3], TensorProto.STRING)], [value("y", [3], TensorProto.STRING)])


@pytest.mark.parametrize(
    ("make", "profiles", "kind", "said"),
    [
        (double, [], UnsupportedError, "'x' is FP64 in the file, and TensorRT would make it FP32"),
        (strings, [], ServerError, "x"),
        (perceptron, [], BuildFailedError, "no optimization profile has been defined"),
        (reshaping, ["x:4/8/16"], BuildFailedError, "'shape' is a shape tensor: its profile gives the 2 values"),
        (perceptron, ["x:1x17"], BuildFailedError, "x"),
    ],
)
def test_what_cannot_be_built_has_a_reason(
    tmp_path: Path, make: Any, profiles: Sequence[str], kind: type[ServerError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        build_engine(request_for(saved(tmp_path, make()), *profiles))


def test_what_the_library_would_ignore_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, perceptron())
    with pytest.raises(BuildFailedError, match="TensorRT for RTX has none and would ignore it"):
        build_engine(request_for(path, "x:8x16", hardware_compatibility="ampere+"))


@pytest.mark.parametrize("make", [perceptron, convolution, attention])
def test_half_precisions_build(tmp_path: Path, make: Any) -> None:
    profile = {perceptron: "x:1x16/4x16/8x16", convolution: "x:1x4x8x8/2x4x8x8/4x4x8x8"}.get(
        make, "x:1x4x16/2x8x16/4x16x16"
    )
    path = saved(tmp_path, make())
    for precision in ("fp16", "bf16"):
        built = build_engine(request_for(path, profile, precision=precision))
        assert {tensor.datatype for tensor in built.info.tensors} == {Datatype.FP32}, "inputs and outputs stay"


@pytest.mark.parametrize("content", [b"", b"nothing at all", b"\x08\x08\x12\x04test:\x00"])
def test_rubbish_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"model\.onnx"):
        build_engine(request_for(path))
    with pytest.raises(InvalidArgumentError, match=r"other\.onnx"):
        build_engine(request_for(tmp_path / "other.onnx"))


def test_a_build_has_a_time_limit_and_can_be_cancelled(tmp_path: Path) -> None:
    request = request_for(saved(tmp_path, perceptron()), "x:1x16/4x16/8x16")
    with pytest.raises(UnavailableError, match=r"not built within 0\.01 s"):
        build_engine(request, timeout_s=0.01)
    answers = iter([True, True, False])
    with pytest.raises(UnavailableError, match="was cancelled"):
        build_engine(request, is_wanted=lambda: next(answers))
    with pytest.raises(AssertionError, match="no build is running"):
        child_of(os.getpid())
    assert build_engine(request).num_bytes > 0  # and neither stands in the way of the next


def test_a_builder_that_is_killed_is_an_error_with_the_signal(tmp_path: Path) -> None:
    request = request_for(saved(tmp_path, perceptron()), "x:1x16/4x16/8x16")

    killed: list[int] = []

    def kill(phase: str, fraction: float) -> None:
        if not killed:  # more may have been told before that
            killed.append(child_of(os.getpid()))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(InternalError, match="ended with signal 9"):
        build_engine(request, tell=kill)


def child_of(pid: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid and b"build_child" in words:
            return int(process.name)
    raise AssertionError("no build is running")


ORPHAN = """
import sys
from pathlib import Path
from modelserver_backends.tensorrt.build_options import BuildRequest
from modelserver_backends.tensorrt.builder import build_engine
import json, os
def tell(phase, fraction):
    print("building", flush=True)
    sys.stdin.read()
build_engine(BuildRequest.from_json(json.loads(sys.argv[1])), tell=tell)
"""


def test_a_builder_does_not_outlive_whoever_wants_the_engine(tmp_path: Path) -> None:
    request = request_for(saved(tmp_path, perceptron()), "x:1x16/4x16/8x16")
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{ORPHAN}", json.dumps(request.to_json())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"building\n"
        child = Path(f"/proc/{child_of(parent.pid)}")
        parent.kill()
        parent.wait()
    deadline_s = time.monotonic() + 30
    while child.exists() and (child / "cmdline").read_bytes():
        assert time.monotonic() < deadline_s, "the build goes on"
        time.sleep(0.02)


RACER = """
import sys, json
from pathlib import Path
from modelserver_backends.tensorrt.build_options import BuildRequest
from modelserver_backends.tensorrt.builder import build_engine
from modelserver_backends.tensorrt.engine_cache import EngineCache
import dataclasses
request = BuildRequest.from_json(json.loads(sys.argv[2]))
found = EngineCache(Path(sys.argv[1])).obtain(
    "k", lambda plan: build_engine(dataclasses.replace(request, plan=str(plan))), facts={}
)
print(found.is_hit, flush=True)
"""


def test_racing_processes_build_a_real_engine_once(tmp_path: Path) -> None:
    request = request_for(saved(tmp_path, perceptron()), "x:1x16/4x16/8x16")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {sys.path!r}\n{RACER}",
        str(tmp_path / "trt"),
        json.dumps(request.to_json()),
    ]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = sorted(racer.communicate(timeout=100)[0] for racer in racers)
    assert outputs == [b"False\n", b"True\n"]
    assert EngineCache(tmp_path / "trt").obtain("k", lambda plan: pytest.fail("it is there"), facts={}).is_hit


@pytest.mark.parametrize("cases", [pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_models_are_errors_of_the_build(tmp_path: Path, cases: int) -> None:
    """In one process, without the child: so a crash would end the tests."""
    generator = random.Random(3)
    whole = perceptron().SerializeToString()
    path = tmp_path / "model.onnx"
    refused = 0
    for _ in range(cases):
        changed = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            build(request_for(path, "x:1x16/4x16/8x16"), lambda phase, fraction: None)
        except ServerError:
            refused += 1
    assert refused > cases // 4

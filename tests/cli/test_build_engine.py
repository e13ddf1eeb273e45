"""`modelserver build-engine`: what it refuses, its exit codes, and with TensorRT for RTX what it builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from modelserver_backends.tensorrt.plan import read_header
from modelserver_backends.tensorrt.sidecar import file_sha256, read_sidecar
from onnx import TensorProto, helper, numpy_helper, save_model
from support.onnx_models import identity_model, onnx_model, value, write_model

from modelserver.cli.main import main

# Of a square of weights that is most of its engine.
SIDE = 256


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["build-engine", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status, captured
    return captured.out, captured.err


def identity(tmp_path: Path) -> Path:
    return identity_model(tmp_path / "m", ["n", "seq"]) / "1" / "model.onnx"


def product_of_weights(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx_model([value("x", ["n", SIDE])], [value("y", ["n", SIDE])], [node])
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return write_model(tmp_path / "m", model) / "1" / "model.onnx"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "'x' dimension 0 (n), 'x' dimension 1 (seq)"),
        (["--batch", "1/2"], "'x' dimension 1 (seq)"),
        (["--batch", "many", "--dim", "seq=1"], "--batch: expected MIN/OPT/MAX"),
        (["--dim", "seq"], "--dim: expected NAME=MIN/OPT/MAX"),
        (["--dim", "length=1/2/3"], "expected symbolic dimensions of its inputs (n, seq), got 'length'"),
        (["--profile", "y:1x1"], "no input 'y' in the model"),
        (["--profile", "x:1x1", "--batch", "1"], "remove --batch and --dim"),
        (["--profile", "x:1x1", "--runtime", "cuda"], "runtime: expected one of"),
        (["--profile", "x:1x1", "--workspace", "big"], "--workspace: expected a size"),
        (["--profile", "x:1x1", "--strip", "--refit"], "expected one of them, got both"),
        (["--profile", "x:1x1", "--target", "sm1"], "target: expected one of"),
        (["--profile", "x:1x1", "-o", "nowhere/x.plan"], "nowhere: expected a directory"),
    ],
)
def test_misuse_is_told_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    _, err = run(capsys, identity(tmp_path), *arguments, status=2)
    assert said in err
    assert run(capsys, tmp_path / "none.onnx", status=2)[1].startswith("error: unable to find")


def test_without_a_library_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorrt", "tensorrt_bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    _, err = run(capsys, identity(tmp_path), "--profile", "x:1x1", "--runtime", "tensorrt", status=5)
    assert "TensorRT is not installed: pip install 'modelserver-py[tensorrt]'" in err


@pytest.mark.tool("tensorrt_rtx")
def test_an_engine_is_built_described_and_verified(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx = identity(tmp_path)
    out, _ = run(
        capsys, onnx, "--batch", "1/4/8", "--dim", "seq=1/16/64", "--precision", "fp16", "--verify", "2", status=0
    )
    plan = tmp_path / "m/1/model.plan"
    assert "profile 0: x:1x1/4x16/8x64" in out
    assert "ONNX fp16" in out
    header, sidecar = read_header(plan), read_sidecar(plan)
    assert sidecar is not None
    assert sidecar.sha256 == file_sha256(plan)
    assert sidecar.built["version"] == header.version_text
    assert sorted(path.name for path in plan.parent.iterdir()) == ["model.onnx", "model.plan", "model.plan.json"]
    written = plan.read_bytes()
    document = json.loads(run(capsys, onnx, "--profile", "x:1x1/1x2/1x3", "--json", "-o", plan, status=0)[0])
    assert document["profiles"] == ["x:1x1/1x2/1x3"]
    assert plan.read_bytes() != written


@pytest.mark.tool("tensorrt_rtx")
def test_nodes_that_are_not_supported_are_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = onnx_model([value("x", [3, 3])], [value("y", [])], [helper.make_node("Det", ["x"], ["y"], name="det")])
    out, err = run(capsys, write_model(tmp_path / "m", model) / "1/model.onnx", status=3)
    assert "has nodes that TensorRT does not support" in err
    assert out.splitlines()[1].startswith("det   Det")
    assert [path.name for path in (tmp_path / "m/1").iterdir()] == ["model.onnx"]


def test_an_engine_takes_the_place_of_no_model_and_of_no_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], bytes(8), raw=True)
    model = onnx_model([value("x", [2])], [value("y", [2])], [helper.make_node("Add", ["x", "w"], ["y"])])
    model.graph.initializer.append(weight)
    directory = tmp_path / "1"
    directory.mkdir()
    onnx = directory / "model.onnx"
    save_model(model, onnx, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (directory / "link.plan").symlink_to("model.onnx")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for output in ("model.onnx", "link.plan", "weights.bin"):
        _, err = run(capsys, onnx, "-o", directory / output, status=2)
        assert "expected a file for the engine, got one of the model's own" in err
    _, err = run(capsys, onnx, "-o", directory, status=2)
    assert "expected a file for the engine, got a directory" in err
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.tool("tensorrt_rtx")
def test_a_build_that_fails_leaves_what_was_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx = identity(tmp_path)
    (onnx.parent / "model.plan").write_bytes(b"old")
    _, err = run(capsys, onnx, "--profile", "x:1x1", "--version-compatible", status=4)
    assert "TensorRT builds no engine" in err
    _, err = run(capsys, onnx, "--profile", "x:1x1", "--timeout", "0.01", status=4)
    assert "not built within" in err
    assert (onnx.parent / "model.plan").read_bytes() == b"old"
    assert sorted(path.name for path in onnx.parent.iterdir()) == ["model.onnx", "model.plan"]


@pytest.mark.tool("tensorrt_rtx")
def test_sparse_kernels_are_asked_for_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx = product_of_weights(tmp_path)
    run(capsys, onnx, "--batch", "1/2/4", "--sparse", "--json", status=0)
    sidecar = read_sidecar(onnx.with_name("model.plan"))
    assert sidecar is not None
    assert sidecar.built["options"]["sparse"] is True


@pytest.mark.tool("tensorrt_rtx", "no-gpu")
@pytest.mark.parametrize("flag", ["--strip", "--refit"])
def test_weights_that_can_be_replaced_need_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    onnx = product_of_weights(tmp_path)
    _, err = run(capsys, onnx, "--batch", "1/2/4", flag, status=4)
    assert "weights are stripped or made replaceable on a machine with a GPU, and here " in err
    assert [path.name for path in onnx.parent.iterdir()] == ["model.onnx"]

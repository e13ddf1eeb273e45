"""Models in 8 and 4 bits: smaller, nearly as right, and never written when they are not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper
from support.digit_samples import write_digit_samples
from support.onnx_models import identity_model, onnx_model, value, write_model

from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError
from modelserver.toolkit.conversion import Outcome
from modelserver.toolkit.onnx_file import read_onnx
from modelserver.toolkit.onnx_quantize import Calibration, OnnxQuantizeOptions, products_saturate, quantized_ops
from modelserver.toolkit.quantization import Method, QuantizationOptions, quantize
from modelserver.toolkit.sample_files import SampleOptions


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_digit_samples(tmp_path_factory.mktemp("samples"))


def run(source: object, output: Path, data: Path | None = None, **fields) -> Outcome:
    samples = SampleOptions(data, measure_s=0.0)
    return quantize(QuantizationOptions(str(source), output, samples=samples, **fields), lambda step: None)


def static(**fields) -> OnnxQuantizeOptions:
    return OnnxQuantizeOptions(is_static=True, **fields)


def test_static_and_dynamic_onnx(model_repository: Path, tmp_path: Path, files: tuple[Path, Path]) -> None:
    training, held_out = files
    source = model_repository / "digits_onnx"
    fixed = run(source, tmp_path / "static", held_out, calibration=training, onnx=static(), max_accuracy_drop=1.0)
    moving = run(source, tmp_path / "dynamic", held_out, onnx=OnnxQuantizeOptions(is_static=False))
    for outcome in (fixed, moving):
        found = outcome.comparison
        assert found.after_bytes < 0.4 * found.before_bytes
        assert found.accuracy_after is not None
        assert found.accuracy_after >= 0.97
        assert outcome.config.backend == "onnxruntime"
    assert quantized_ops(read_onnx(tmp_path / "static/1/model.onnx")) == {"Gemm": 3}
    assert quantized_ops(read_onnx(tmp_path / "dynamic/1/model.onnx")) == {"MatMulInteger": 3}
    assert fixed.notes[:2] == ("in integers: 3 Gemm", "in floating point: 1 ArgMax, 1 Softmax")


def test_shapes_of_weights_that_a_file_tells_do_not_stand_in_the_way(tmp_path: Path) -> None:
    """As torch's exporter writes a linear layer: its weight transposed, and the shape of that beside it."""
    weight = numpy_helper.from_array(np.ones((3, 8), np.float32), "weight")
    layer = helper.make_node("Gemm", ["x", "weight"], ["y"], transB=1)
    model = onnx_model([value("x", ["n", 8])], [value("y", ["n", 3])], [layer])
    model.graph.initializer.append(weight)
    model.graph.value_info.append(value("weight", [3, 8]))
    run(write_model(tmp_path / "m", model), tmp_path / "made", onnx=OnnxQuantizeOptions(is_static=False))
    assert quantized_ops(read_onnx(tmp_path / "made/1/model.onnx")) == {"MatMulInteger": 1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (static(per_channel=False, calibration=Calibration.PERCENTILE), {"Gemm": 3}),
        (static(calibration=Calibration.ENTROPY, exclude_ops=("Softmax",)), {"Gemm": 3}),
        (static(for_tensorrt=True), {"Gemm": 3}),
        (static(ops=("Gemm",)), {"Gemm": 3}),
    ],
    ids=["percentile", "entropy", "tensorrt", "ops"],
)
def test_ways_of_static_quantization(
    model_repository: Path, tmp_path: Path, files: tuple[Path, Path], options: OnnxQuantizeOptions, expected: dict
) -> None:
    outcome = run(
        model_repository / "digits_onnx", tmp_path / "made", calibration=files[0], onnx=options, num_calibration=32
    )
    assert outcome.comparison.accuracy_after is not None
    assert outcome.comparison.accuracy_after > 0.95
    model = read_onnx(tmp_path / "made/1/model.onnx")
    assert quantized_ops(model) == expected
    if options.for_tensorrt:
        zeros = [one for one in model.graph.initializer if "zero_point" in one.name]
        assert zeros
        assert all(not any(one.raw_data) and not any(one.int32_data) for one in zeros)
        assert not any(one.name.startswith("bias") and one.data_type == 6 for one in model.graph.initializer)


@pytest.mark.parametrize(
    ("machine", "flags", "saturates"),
    [
        ("x86_64", "sse4_1 avx2", True),
        ("x86_64", "avx2 avx512f avx512bw", True),
        ("AMD64", "", True),
        ("x86_64", "avx2 avx512f avx512_vnni", False),
        ("x86_64", "avx2 avx_vnni", False),
        ("aarch64", "asimd", False),
        ("arm64", "", False),
    ],
)
def test_x86_cpus_without_vnni_saturate(machine: str, flags: str, saturates: bool) -> None:
    assert products_saturate(machine, flags.split()) is saturates


def _worst_sum(path: Path) -> int:
    """The largest sum of two products that an activation of 8 bits can make with weights of one column."""
    model = read_onnx(path)
    weights = [numpy_helper.to_array(one).astype(int) for one in model.graph.initializer if len(one.dims) == 2]
    return max(255 * int(np.sort(weight if positive else -weight, axis=axis).take((-1, -2), axis).sum(axis).max())
               for weight in weights for positive in (True, False) for axis in (0, 1))  # fmt: skip


@pytest.mark.parametrize("options", [static(), static(for_tensorrt=True), static(per_channel=False), None], ids=str)
@pytest.mark.parametrize(
    ("flags", "said", "is_reduced", "note"),
    [
        ("avx2", None, True, "weights in 7 bits: this CPU has no VNNI"),
        ("avx2", False, False, "weights in 8 bits, as --no-reduce-range says: this CPU has no VNNI"),
        ("avx2 avx_vnni", None, False, "weights in 8 bits: on x86 CPUs without VNNI"),
        ("avx2 avx_vnni", True, True, "weights in 7 bits, as --reduce-range says"),
    ],
)
def test_weights_have_seven_bits_where_sums_of_products_would_saturate(
    model_repository: Path,
    tmp_path: Path,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    options: OnnxQuantizeOptions | None,
    flags: str,
    said: bool | None,
    is_reduced: bool,
    note: str,
) -> None:
    monkeypatch.setattr("modelserver.toolkit.onnx_quantize.cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    chosen = replace(options or OnnxQuantizeOptions(is_static=False), reduce_range=said)
    given = {"calibration": files[0], "num_calibration": 32} if options else {}
    outcome = run(model_repository / "digits_onnx", tmp_path / "made", onnx=chosen, **given)
    assert outcome.notes[-1].startswith(note)
    assert (_worst_sum(tmp_path / "made/1/model.onnx") <= 32767) is is_reduced


def test_recorded_requests_calibrate(model_repository: Path, tmp_path: Path, files: tuple[Path, Path]) -> None:
    images = np.load(files[0])["image"][:8]
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"image": image.reshape(-1).tolist()} for image in images]}))
    outcome = run(model_repository / "digits_onnx", tmp_path / "made", files[1], requests=path, onnx=static())
    assert outcome.comparison.accuracy_after is not None
    assert outcome.comparison.accuracy_after > 0.9


def test_what_cannot_be_quantized_is_said_and_nothing_is_written(
    model_repository: Path, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    training, held_out = files
    plain = identity_model(tmp_path / "plain", ["b", 2])
    loose = tmp_path / "loose.npz"
    np.savez(loose, x=np.zeros((3, 2), np.float32))
    wild = tmp_path / "wild.npz"
    np.savez(wild, image=1e4 * np.random.default_rng(0).standard_normal((4, 8, 8)), labels=[0, 1, 2, 3])
    digits = model_repository / "digits_onnx"
    for source, fields, reason in (
        (digits, {"method": Method.STATIC, "onnx": static()}, "needs to see real inputs"),
        (digits, {"method": Method.INT4}, "expected static or dynamic"),
        (digits, {"calibration": training, "requests": training, "onnx": static()}, "cannot be used together"),
        (digits, {"calibration": training, "onnx": static(ops=("Gem",))}, "no Gem; did you mean 'Gemm'"),
        (digits, {"calibration": training, "onnx": static(exclude_nodes=("n",))}, "no names, so exclude operators"),
        (digits, {"calibration": training, "method": Method.DYNAMIC, "data": held_out}, "--calibration is for"),
        (digits, {"calibration": loose, "onnx": static()}, "'x' is not an input"),
        (digits, {"calibration": wild, "onnx": static(), "data": held_out, "max_accuracy_drop": 2.0}, "Nothing was w"),
        (digits, {"onnx": OnnxQuantizeOptions(is_static=False), "max_accuracy_drop": 1.0}, "needs labelled samples"),
        (model_repository / "digits_int8", {"calibration": training, "onnx": static()}, "quantized already"),
        (model_repository / "digits_torchscript", {}, "convert it to ONNX first"),
        (
            plain,
            {"calibration": loose, "onnx": static()},
            "could be quantized: it consists of 1 Identity",
        ),
    ):
        with pytest.raises(ServerError, match=reason):
            run(source, tmp_path / "made", **fields)
        assert not (tmp_path / "made").exists()


@pytest.mark.tool("torchao")
@pytest.mark.parametrize("method", [Method.INT8, Method.INT4, Method.DYNAMIC])
def test_pytorch_weights(model_repository: Path, tmp_path: Path, files: tuple[Path, Path], method: Method) -> None:
    outcome = run(model_repository / "digits_export", tmp_path / "made", files[1], method=method)
    assert outcome.comparison.accuracy_after is not None
    assert outcome.comparison.accuracy_after >= 0.97
    assert outcome.notes == ("quantized 2 linear layers: network.hidden, network.last", "left as they are: 2 conv2d")
    assert b"torch.ops.torchao" not in (tmp_path / "made/1/model.pt2").read_bytes()
    if method is not Method.DYNAMIC:
        assert outcome.comparison.after_bytes < 0.7 * outcome.comparison.before_bytes


@pytest.mark.tool("torchao")
def test_layers_of_pytorch_may_be_left_out(model_repository: Path, tmp_path: Path) -> None:
    source = model_repository / "digits_export"
    onnx = OnnxQuantizeOptions(exclude_nodes=("network.last",))
    assert run(source, tmp_path / "made", onnx=onnx).notes[0] == "quantized 1 linear layers: network.hidden"
    with pytest.raises(InvalidArgumentError, match=r"no linear layer 'x' \(there are network.hidden, network.last\)"):
        run(source, tmp_path / "other", onnx=OnnxQuantizeOptions(exclude_nodes=("x",)))
    with pytest.raises(UnsupportedError, match="no linear layer whose weights"):
        run(source, tmp_path / "other", onnx=OnnxQuantizeOptions(exclude_nodes=("network.last", "network.hidden")))


def test_torchao_is_asked_for_when_it_is_missing(
    model_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.quantization", raising=False)
    with pytest.raises(ServerError, match=r"torchao.*pip install 'modelserver-py\[quantize\]'"):
        run(model_repository / "digits_export", tmp_path / "made")

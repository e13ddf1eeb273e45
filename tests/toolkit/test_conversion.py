"""Every way from one form to another ends in a model that answers as its source did."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support.digit_samples import write_digit_samples
from support.onnx_models import onnx_model, value, write_model

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ServerError, UnsupportedError
from modelserver.toolkit.comparison import Difference
from modelserver.toolkit.conversion import ConversionOptions, Target, check_tolerance, convert
from modelserver.toolkit.loaded_model import LoadedModel
from modelserver.toolkit.sample_files import SampleOptions
from modelserver.toolkit.tensor_spec import ModuleOptions, parse_tensor_spec

QUICK = SampleOptions(measure_s=0.0)
CODE = """
    import torch

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, rows, shift):
            made = self.layer(rows)
            return made + shift, made.argmax(dim=1, keepdim=True)

    def build():
        torch.manual_seed(0)
        return Two()

    class Odd(torch.nn.Module):
        def forward(self, rows):
            return torch.linalg.eigvals(rows.unsqueeze(1) * rows.unsqueeze(2)).real

    class Branching(torch.nn.Module):
        def forward(self, rows):
            return rows if rows.sum() > 0 else -rows

    number = 3

    def broken():
        raise RuntimeError("no weights here")
"""


def run(source: object, output: Path, target: Target, **fields):
    options = ConversionOptions(str(source), output, target, **{"samples": QUICK, **fields})
    return convert(options, lambda step: None)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleOptions:
    return SampleOptions(write_digit_samples(tmp_path_factory.mktemp("samples"))[1], measure_s=0.02)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "network.py"
    path.write_text(textwrap.dedent(CODE))
    return path


@pytest.mark.parametrize(
    ("source", "target", "backend"),
    [
        ("digits_onnx", Target.FP16, "onnxruntime"),
        pytest.param("digits_export", Target.ONNX, "onnxruntime", marks=pytest.mark.slow),
        ("digits_torchscript", Target.ONNX, "onnxruntime"),
        ("digits_export", Target.PT2, "pytorch"),
    ],
)
def test_digits_in_another_form_are_read_as_well(
    model_repository: Path, tmp_path: Path, samples: SampleOptions, source: str, target: Target, backend: str
) -> None:
    outcome = run(model_repository / source, tmp_path / "made", target, samples=samples)
    found = outcome.comparison
    assert found.accuracy_before == found.accuracy_after
    assert found.accuracy_after is not None
    assert found.accuracy_after > 0.97
    assert [one.rows for one in found.latencies] == [1, 64]
    config = parse_pbtxt((tmp_path / "made/config.pbtxt").read_text()).config
    assert (config.backend, config.max_batch_size) == (backend, 64)
    assert config.dynamic_batching is not None
    old = parse_pbtxt((model_repository / source / "config.pbtxt").read_text()).config
    assert [spec.name for spec in config.output] == [spec.name for spec in old.output or outcome.config.output]


def test_code_becomes_a_model_with_the_names_that_were_said(code: Path, tmp_path: Path) -> None:
    module = ModuleOptions(
        (parse_tensor_spec("rows:FP32:4"), parse_tensor_spec("shift:FP32:1")), ("scores", "best"), max_batch_size=16
    )
    outcome = run(f"{code}:build", tmp_path / "repo/two", Target.ONNX, module=module)
    assert outcome.comparison.max_rel < 1e-5
    with LoadedModel.open(tmp_path / "repo/two") as model:
        assert model.config.max_batch_size == 16
        answer = model.infer({"rows": np.ones((5, 4)), "shift": np.full((5, 1), 2.0)})
    assert {name: array.shape for name, array in answer.items()} == {"scores": (5, 3), "best": (5, 1)}


@pytest.mark.parametrize(
    ("name", "inputs", "kind", "reason"),
    [
        ("Odd", ["rows:FP32:3"], UnsupportedError, "no translation for aten::linalg_eig"),
        ("Branching", ["rows:FP32:3"], UnsupportedError, "torch.export cannot trace"),
        ("build", [], InvalidArgumentError, r"forward\(rows, shift\).*--input rows:FP32"),
        ("build", ["shift:FP32:1"], InvalidArgumentError, "in order"),
        ("buidl", [], NotFoundError, "has no 'buidl'; did you mean 'build'"),
        ("number", [], InvalidArgumentError, "is a int; expected a torch.nn.Module"),
        ("broken", [], ServerError, "no weights here"),
    ],
)
def test_code_that_does_not_fit_is_explained(
    code: Path, tmp_path: Path, name: str, inputs: list[str], kind: type[ServerError], reason: str
) -> None:
    module = ModuleOptions(tuple(parse_tensor_spec(text) for text in inputs))
    with pytest.raises(kind, match=reason):
        run(f"{code}:{name}", tmp_path / "repo/model", Target.ONNX, module=module)
    assert not (tmp_path / "repo/model").exists()


def test_variable_dimensions_stay_variable(tmp_path: Path, code: Path) -> None:
    code.write_text(
        "import torch\nclass Sum(torch.nn.Module):\n    def forward(self, x):\n        return x.sum(dim=-1)\n"
    )
    module = ModuleOptions((parse_tensor_spec("x:FP32:-1,2,-1"),), ("total",), max_batch_size=0)
    run(f"{code}:Sum", tmp_path / "sum", Target.PT2, module=module)
    with LoadedModel.open(tmp_path / "sum") as model:
        assert model.config.max_batch_size == 0
        for shape in ((3, 2, 5), (4, 2, 9)):
            assert model.infer({"x": np.ones(shape)})["total"].shape == shape[:2]


def test_labels_and_settings_come_along(model_repository: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "1").mkdir(parents=True)
    (source / "1/model.onnx").write_bytes((model_repository / "digits_onnx/1/model.onnx").read_bytes())
    (source / "labels.txt").write_text("\n".join("0123456789"))
    (source / "config.pbtxt").write_text(
        'name: "source" backend: "onnxruntime" max_batch_size: 32 '
        'output { name: "probabilities" data_type: TYPE_FP32 dims: [10] label_filename: "labels.txt" } '
        'output { name: "digit" data_type: TYPE_INT64 dims: [1] } '
        'parameters { key: "intra_op_thread_count" value { string_value: "1" } } '
        "instance_group { count: 2 kind: KIND_CPU } version_policy { specific { versions: [ 1 ] } }"
    )
    run(source, tmp_path / "made", Target.FP16)
    config = parse_pbtxt((tmp_path / "made/config.pbtxt").read_text()).config
    assert config.name == ""
    assert config.max_batch_size == 32
    assert config.dynamic_batching is None
    assert config.output[0].label_filename == "labels.txt"
    assert config.parameters == {"intra_op_thread_count": "1"}
    assert config.instance_group[0].count == 2
    assert config.version_policy is None
    copied = tmp_path / "made/labels.txt"
    assert copied.read_text() == (source / "labels.txt").read_text()
    assert copied.stat().st_ino != (source / "labels.txt").stat().st_ino


def test_what_cannot_be_converted_is_said_and_nothing_is_written(model_repository: Path, tmp_path: Path) -> None:
    integer = write_model(tmp_path / "integer", onnx_model([value("x", ["b", 2], 7)], [value("y", ["b", 2], 7)]))
    fp16 = tmp_path / "fp16"
    run(model_repository / "digits_onnx", fp16, Target.FP16, keep_ops=("Softmax",))
    for source, target, fields, reason in (
        ("digits_onnx", Target.PT2, {}, "can become fp16"),
        ("digits_onnx", Target.ONNX, {}, "can become fp16"),
        ("digits_torchscript", Target.PT2, {}, "FILE.py:NAME"),
        ("digits_onnx", Target.FP16, {"keep_ops": ("Softmx",)}, "no Softmx; did you mean 'Softmax'"),
        ("digits_export", Target.PT2, {"keep_ops": ("Softmax",)}, "--keep-op is for --to fp16"),
        ("digits_onnx", Target.FP16, {"tolerance": 0.0}, "Nothing was written; --tolerance"),
        (integer, Target.FP16, {}, "no FP32 weights"),
        (fp16, Target.FP16, {}, "in FP16 already"),
    ):
        with pytest.raises(ServerError, match=re.escape(reason)):
            run(model_repository / source, tmp_path / "made", target, **fields)
        assert not (tmp_path / "made").exists()
    with pytest.raises(AlreadyExistsError):
        run(model_repository / "digits_onnx", fp16, Target.FP16)


def test_fp16_tells_what_it_could_not_keep(tmp_path: Path) -> None:
    from onnx import helper, numpy_helper

    nodes = [helper.make_node("Mul", ["x", "w"], ["s"]), helper.make_node("CumSum", ["s", "axis"], ["y"])]
    model = onnx_model([value("x", ["b", 2])], [value("y", ["b", 2])], nodes)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([1e6, 1.0], np.float32), "w"),
            numpy_helper.from_array(np.array(1, np.int64), "axis"),
        ]
    )
    outcome = run(write_model(tmp_path / "source", model), tmp_path / "made", Target.FP16, tolerance=float("inf"))
    assert outcome.notes == ("kept in FP32: CumSum", "weights beyond 65504 are cut off: w")


def test_classes_may_differ_a_little_and_numbers_may_not() -> None:
    few = Difference("digit", 8.0, 0.9, 0.1, 0.97, is_discrete=True)
    check_tolerance((few,), 1e-3)
    with pytest.raises(ServerError, match="'digit'"):
        check_tolerance((Difference("digit", 8.0, 0.9, 0.1, 0.8, is_discrete=True),), 1e-3)
    with pytest.raises(ServerError, match="'p'"):
        check_tolerance((few, Difference("p", 0.5, 0.5, 0.1, 1.0)), 1e-3)


def test_a_pickle_in_a_program_is_not_executed(model_repository: Path, tmp_path: Path) -> None:
    import io
    import pickle
    import zipfile

    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    source = tmp_path / "evil.pt2"
    whole = zipfile.ZipFile(model_repository / "digits_export/1/model.pt2")
    with zipfile.ZipFile(source, "w") as archive:
        for name in whole.namelist():
            content = whole.read(name)
            if "sample_inputs" in name and name.endswith(".pt"):
                content = pickle.dumps(Touch(), protocol=2)
            archive.writestr(name, io.BytesIO(content).getvalue())
    with pytest.raises(ServerError):
        run(source, tmp_path / "made", Target.ONNX)
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_compiled_packages_answer_as_well(code: Path, tmp_path: Path) -> None:
    module = ModuleOptions(
        (parse_tensor_spec("rows:FP32:4"), parse_tensor_spec("shift:FP32:1")), ("scores", "best"), max_batch_size=16
    )
    outcome = run(f"{code}:build", tmp_path / "two", Target.AOTI, module=module)
    assert outcome.comparison.max_rel < 1e-5
    config = parse_pbtxt((tmp_path / "two/config.pbtxt").read_text()).config
    assert (config.platform, config.max_batch_size) == ("torch_aoti", 16)


@pytest.mark.slow
def test_packages_take_a_row_alone_and_the_batches_that_the_compiler_left(
    model_repository: Path, tmp_path: Path, samples: SampleOptions
) -> None:
    """Torch's compiler takes sizes for 2 at least; of this convolution it bounds the batch from above, too."""
    outcome = run(model_repository / "digits_export", tmp_path / "digits", Target.AOTI, samples=samples)
    assert outcome.notes == (
        f"torch's compiler has bound the batch: max_batch_size is {outcome.config.max_batch_size}",
    )
    assert outcome.comparison.max_rel < 1e-5
    assert outcome.comparison.accuracy_after == outcome.comparison.accuracy_before
    image = np.zeros((1, 8, 8), np.float32)
    with LoadedModel.open(tmp_path / "digits") as made, LoadedModel.open(model_repository / "digits_export") as given:
        assert made.infer({"image": image})["digit"] == given.infer({"image": image})["digit"]

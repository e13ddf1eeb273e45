"""Differences, accuracy and latency of two models."""

from pathlib import Path

import numpy as np
import pytest

from modelserver.config.schema import ModelConfig, ModelOutput
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError
from modelserver.toolkit.comparison import (
    accuracy,
    compare,
    comparison_document,
    difference_rows,
    differences,
    label_output,
    summary_rows,
)
from modelserver.toolkit.loaded_model import LoadedModel
from modelserver.toolkit.samples import Samples
from training.digits import held_out


def test_differences_are_told_per_output() -> None:
    before = {"p": np.array([[0.0, 2.0], [1.0, 0.5]], np.float32), "c": np.array([[1], [0]])}
    after = {"p": np.array([[0.0, 1.0], [1.0, 1.5]], np.float32), "c": np.array([[1], [1]])}
    p, c = differences(before, after)
    assert (p.max_abs, p.max_rel, p.mean_abs, p.agreement, p.is_discrete) == (1.0, 0.5, 0.5, 0.5, False)
    assert (c.agreement, c.is_discrete) == (0.5, True)


def test_nan_is_a_difference_and_text_is_compared() -> None:
    (one,) = differences({"y": np.array([1.0, 2.0])}, {"y": np.array([1.0, np.nan])})
    assert one.max_abs == float("inf")
    (same,) = differences({"y": np.array([np.inf])}, {"y": np.array([np.inf])})
    assert same.max_abs == 0
    (text,) = differences({"y": np.array([b"a", b"b"], object)}, {"y": np.array([b"a", b"c"], object)})
    assert text.agreement == 0.5


def test_other_outputs_and_shapes_are_errors() -> None:
    with pytest.raises(ServerError, match=r"the outputs \['z'\], the old one \['y'\]"):
        differences({"y": np.zeros(1)}, {"z": np.zeros(1)})
    with pytest.raises(ServerError, match=r"is \[2\] of the new model"):
        differences({"y": np.zeros(1)}, {"y": np.zeros(2)})


def test_labels_are_compared_with_classes_or_their_largest() -> None:
    labels = np.array([1, 0, 1])
    scores = np.array([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]])
    assert accuracy({"p": scores}, labels, "p") == pytest.approx(2 / 3)
    assert accuracy({"c": labels[:, None]}, labels, "c") == 1.0


def test_the_output_of_labels_is_found_or_asked_for() -> None:
    def config(*outputs: tuple[str, Datatype, tuple[int, ...]]) -> ModelConfig:
        return ModelConfig(output=tuple(ModelOutput(name=n, data_type=t, dims=d) for n, t, d in outputs))

    both = config(("score", Datatype.FP32, (1,)), ("p", Datatype.FP32, (10,)), ("c", Datatype.INT64, (1,)))
    assert label_output(both) == "p"
    assert label_output(both, "c") == "c"
    with pytest.raises(InvalidArgumentError, match=r"--label-output: no output 'd'.* \(the model has score, p, c\)"):
        label_output(both, "d")
    with pytest.raises(InvalidArgumentError, match="say it with --label-output"):
        label_output(config(("score", Datatype.FP32, (1,))))


def test_two_models_side_by_side(model_repository: Path) -> None:
    images, labels = held_out()
    samples = Samples({"image": images[:50]}, labels[:50])
    with (
        LoadedModel.open(model_repository / "digits_onnx") as one,
        LoadedModel.open(model_repository / "digits_int8") as other,
    ):
        found = compare(one, other, samples, sizes=(100, 25), measure_s=0.05)
    assert found.accuracy_before is not None
    assert found.accuracy_before > 0.9
    assert [latency.rows for latency in found.latencies] == [1, 64]
    assert 0 < found.differences[0].max_rel < 0.2
    assert summary_rows(found)[0] == ("size", "100 B", "25 B", "-75.0 %")
    assert [row[0] for row in summary_rows(found)[1:]] == ["latency, 1 row", "latency, 64 rows", "accuracy, 50 samples"]
    assert [row[0] for row in difference_rows(found)] == ["probabilities", "digit"]
    document = comparison_document(found)
    assert document["size_bytes"] == {"before": 100, "after": 25}


def test_a_model_that_cannot_be_loaded_says_why(model_repository: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no model directory"):
        LoadedModel.open(tmp_path / "absent")
    with pytest.raises(NotFoundError, match="no version 7"):
        LoadedModel.open(model_repository / "digits_onnx", version=7)
    with pytest.raises(InvalidArgumentError, match="is an ensemble"):
        LoadedModel.open(model_repository / "digits_pipeline")
    with (
        LoadedModel.open(model_repository / "digits_versions", version=2) as model,
        pytest.raises(InvalidArgumentError, match="no input 'x'"),
    ):
        model.infer({"x": np.zeros(1)})

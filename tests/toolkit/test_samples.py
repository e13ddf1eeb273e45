"""Samples are made up for every datatype, and what people give is checked."""

import numpy as np
import pytest

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError
from modelserver.toolkit.samples import MadeUp, checked_samples, made_up_samples


def config_of(*inputs: ModelInput, max_batch_size: int = 8) -> ModelConfig:
    return ModelConfig(max_batch_size=max_batch_size, input=inputs)


IMAGE = config_of(ModelInput(name="image", data_type=Datatype.FP32, dims=(2, 2)))


@pytest.mark.parametrize("datatype", list(Datatype))
def test_made_up_samples_have_the_datatype_and_shape(datatype: Datatype) -> None:
    config = config_of(ModelInput(name="x", data_type=datatype, dims=(3, -1)))
    samples = made_up_samples(config, MadeUp(5, {"x": (3, 4)}))
    assert samples.arrays["x"].shape == (5, 3, 4)
    assert samples.arrays["x"].dtype == datatype.numpy
    assert samples.is_made_up
    again = made_up_samples(config, MadeUp(5, {"x": (3, 4)}))
    np.testing.assert_array_equal(samples.arrays["x"], again.arrays["x"])


def test_shapes_must_fit() -> None:
    with pytest.raises(InvalidArgumentError, match=r"does not fit the model's \[2, 2\]"):
        made_up_samples(IMAGE, MadeUp(1, {"image": (2, 3)}))
    with pytest.raises(InvalidArgumentError, match=r"no input 'imege'.*did you mean 'image'"):
        made_up_samples(IMAGE, MadeUp(1, {"imege": (2, 2)}))


@pytest.mark.parametrize(("max_batch_size", "shapes"), [(2, [(2, 2, 2), (1, 2, 2)]), (0, [(2, 2)] * 3)])
def test_requests_are_batches_or_single_samples(max_batch_size: int, shapes: list[tuple[int, ...]]) -> None:
    config = config_of(*IMAGE.input, max_batch_size=max_batch_size)
    samples = checked_samples({"image": np.zeros((3, 2, 2))}, config, "here")
    assert [request["image"].shape for request in samples.requests(config)] == shapes


def test_labels_come_along() -> None:
    samples = checked_samples({"image": np.zeros((3, 2, 2), np.uint8), "labels": [[1], [2], [3]]}, IMAGE, "here")
    assert samples.arrays["image"].dtype == np.float32
    assert samples.labels is not None
    assert samples.head(2).labels.tolist() == [1, 2]
    assert samples.head(2).count == 2


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"image": np.zeros((3, 2))}, r"'image' must be \[samples, 2, 2\], got \[3, 2\]"),
        ({"image": np.zeros((0, 2, 2))}, "one at least"),
        ({"image": np.array(["a", "b", "c", "d"]).reshape(1, 2, 2)}, "must be FP32, got <U1"),
        ({"image": np.full((1, 2, 2), np.nan)}, "not finite"),
        ({"picture": np.zeros((1, 2, 2))}, "'picture' is not an input"),
        ({"labels": np.zeros(3, int)}, "input 'image' is missing"),
        ({"image": np.zeros((3, 2, 2)), "labels": np.zeros(2, int)}, "same number of samples.*image 3, labels 2"),
        ({"image": np.zeros((3, 2, 2)), "labels": np.zeros(3)}, "one whole number per sample"),
    ],
)
def test_what_does_not_fit_is_named(arrays: dict, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        checked_samples(arrays, IMAGE, "here")

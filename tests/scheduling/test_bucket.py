from __future__ import annotations

import numpy as np
import pytest
from support.batching import batching_config, tensor

from modelserver.config.schema import ModelInput
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.scheduling.queue import BucketKey, bucket_key

FP32 = Datatype.FP32


def sent(**shapes: tuple[int, ...]) -> InFlightRequest:
    return InFlightRequest(
        model_name="m",
        version=None,
        inputs={name: tensor(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()},
    )


def key_of(*inputs: ModelInput) -> BucketKey | None:
    return bucket_key(batching_config(input=inputs))


def test_fixed_inputs_all_fit_together() -> None:
    assert key_of(ModelInput("A", FP32, dims=(3,))) is None


@pytest.mark.parametrize(
    ("spec", "one", "other", "are_together"),
    [
        (ModelInput("A", FP32, dims=(-1,)), sent(A=(1, 3)), sent(A=(4, 3)), True),
        (ModelInput("A", FP32, dims=(-1,)), sent(A=(1, 3)), sent(A=(1, 4)), False),
        (ModelInput("A", FP32, dims=(3,), optional=True), sent(A=(1, 3)), sent(), False),
        (ModelInput("A", FP32, dims=(-1,), optional=True), sent(), sent(), True),
    ],
)
def test_key(spec: ModelInput, one: InFlightRequest, other: InFlightRequest, are_together: bool) -> None:
    key = key_of(spec)
    assert key is not None
    assert (key(one) == key(other)) is are_together


def test_ragged_inputs_may_differ() -> None:
    assert key_of(ModelInput("A", FP32, dims=(-1,), allow_ragged_batch=True)) is None


def test_shape_tensors_are_compared_by_content() -> None:
    key = key_of(ModelInput("A", FP32, dims=(2,), is_shape_tensor=True))
    assert key is not None
    one, other = sent(A=(1, 2)), sent(A=(1, 2))
    assert key(one) == key(other)
    other.inputs["A"].data[0, 0] = 1
    assert key(one) != key(other)

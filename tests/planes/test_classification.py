"""The best classes of arrays of any shape, compared with sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.planes.shared_memory_io import classify

FLOATS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.floats(-2, 2, width=16)
)


@given(data=FLOATS, count=st.integers(1, 50))
def test_the_order_is_that_of_values_and_then_of_indices(data: np.ndarray, count: int) -> None:
    found = classify(Tensor("y", Datatype.FP32, data), count, (), is_batched=True)
    assert found.datatype is Datatype.BYTES
    assert found.shape == (data.shape[0], min(count, data.shape[1]))
    for row, texts in zip(data, found.data, strict=True):
        best = sorted(range(len(row)), key=lambda index, row=row: (-row[index], index))[:count]
        assert [int(text.split(b":")[1]) for text in texts] == best


def test_unsigned_and_lowest_integers_are_not_negated() -> None:
    data = np.array([0, 2**64 - 1, 5], np.uint64)
    found = classify(Tensor("y", Datatype.UINT64, data), 2, ("a", "", "c"), is_batched=False)
    assert found.data.tolist() == [b"18446744073709551615:1", b"5:2:c"]
    data = np.array([-128, 127], np.int8)
    assert classify(Tensor("y", Datatype.INT8, data), 1, (), is_batched=False).data.tolist() == [b"127:1"]


def test_brain_floats_are_numbers() -> None:
    bits = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert classify(Tensor("y", Datatype.BF16, bits), 2, (), is_batched=False).data.tolist() == [
        b"1.500000:0",
        b"-2.000000:1",
    ]


@pytest.mark.parametrize("datatype", [Datatype.BOOL, Datatype.BYTES])
def test_what_has_no_order_is_refused(datatype: Datatype) -> None:
    with pytest.raises(InvalidArgumentError, match=f"unsupported type '{datatype.value}'"):
        classify(Tensor("y", datatype, np.zeros(1, datatype.numpy)), 1, (), is_batched=False)


def test_more_than_a_million_elements_are_refused() -> None:
    data = np.broadcast_to(np.zeros((), np.int8), (1_000_001,))
    with pytest.raises(InvalidArgumentError, match="1000001 elements"):
        classify(Tensor("y", Datatype.INT8, data), 1, (), is_batched=False)

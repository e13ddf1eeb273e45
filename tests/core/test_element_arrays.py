"""Object arrays of many elements: as NumPy's own, and their elements are released with their last view."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from modelserver.core.element_arrays import SLICE_ELEMENTS, concatenate, empty_array, empty_elements

SMALL, LARGE = 5, 5 * SLICE_ELEMENTS + 3


@pytest.mark.parametrize("count", [0, SMALL, LARGE])
def test_elements_are_none_until_they_are_set(count: int) -> None:
    array = empty_elements(count)
    assert array.shape == (count,)
    assert array.dtype == object
    assert array.tolist() == [None] * count


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_elements_live_as_long_as_a_view_of_them(count: int) -> None:
    element = object()
    before = sys.getrefcount(element)
    array = empty_elements(count)
    array[:] = [element] * count
    last = array.reshape(1, count)[:, -1:]
    del array
    assert sys.getrefcount(element) == before + count
    assert last[0, 0] is element
    del last
    while sys.getrefcount(element) != before:  # in a thread; else the time limit ends the test
        time.sleep(0.001)


def test_an_element_that_is_replaced_is_released() -> None:
    element = object()
    before = sys.getrefcount(element)
    array = empty_elements(LARGE)
    array[7] = element
    array[7] = None
    assert sys.getrefcount(element) == before
    assert array.copy().tolist() == [None] * LARGE


def test_numbers_are_arrays_as_ever() -> None:
    assert empty_array(LARGE, np.dtype(np.float32)).dtype == np.float32
    assert empty_array(LARGE, np.dtype(object))[-1] is None


@pytest.mark.parametrize("rows", [3, LARGE])
@pytest.mark.parametrize("dtype", [object, np.int64])
def test_arrays_are_joined_along_the_first_dimension(rows: int, dtype: type) -> None:
    first = np.arange(2 * rows).reshape(rows, 2).astype(dtype)
    second = np.arange(4).reshape(2, 2).astype(dtype)
    joined = concatenate([first, second, first[:0]])
    assert joined.dtype == dtype
    np.testing.assert_array_equal(joined, np.concatenate([first, second]))

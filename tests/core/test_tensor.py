import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor, tensor_from_bytes, tensor_to_bytes
from modelserver.errors import InvalidArgumentError


@pytest.mark.parametrize("datatype", [d for d in Datatype if d is not Datatype.BYTES])
def test_numeric_tensors_are_views_of_the_received_bytes(datatype: Datatype) -> None:
    raw = bytes(range(6 * datatype.itemsize))
    tensor = tensor_from_bytes("x", datatype, (2, 3), raw)
    assert tensor.shape == (2, 3)
    assert tensor.data.dtype == datatype.numpy
    assert not tensor.data.flags.owndata
    assert bytes(tensor_to_bytes(tensor)) == raw


def test_leaving_takes_no_copy_of_a_contiguous_array() -> None:
    data = np.arange(4, dtype=np.float32)
    sent = memoryview(tensor_to_bytes(Tensor("y", Datatype.FP32, data)))
    data[0] = 7
    assert np.frombuffer(sent, np.float32)[0] == 7


def test_a_strided_array_is_laid_out_row_major() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert bytes(tensor_to_bytes(Tensor("y", Datatype.INT16, data))) == np.ascontiguousarray(data).tobytes()


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_bytes_elements_round_trip(elements: list[bytes]) -> None:
    data = np.empty(len(elements), dtype=object)
    data[:] = elements
    raw = tensor_to_bytes(Tensor("s", Datatype.BYTES, data))
    assert list(tensor_from_bytes("s", Datatype.BYTES, (len(elements),), raw).data) == elements


def test_text_elements_leave_as_utf8() -> None:
    raw = tensor_to_bytes(Tensor("s", Datatype.BYTES, np.array(["é"], dtype=object)))
    assert raw == b"\x02\x00\x00\x00\xc3\xa9"


@pytest.mark.parametrize(
    ("shape", "raw", "told"),
    [
        ((2,), b"\x01\x00\x00\x00a", "expected 2 string elements for inference input 's' for the model, got 1"),
        ((2,), b"\x04\x00\x00\x00abcd", "expected 2 string elements for inference input 's' for the model, got 1"),
        ((2**40,), b"", f"expected {2**40} string elements for inference input 's' for the model, got 0"),
        ((3,), bytes(8), "expected 3 string elements for inference input 's' for the model, got 2"),
        ((20_000,), bytes(4 * 19_999), "expected 20000 string elements for inference input 's' .* got 19999"),
        ((2,), b"\x05\x00\x00\x00ab", "expected 2 string elements for inference input 's' for the model, got 1"),
        ((1,), bytes(8), "unexpected number of string elements 2 for inference input 's' for the model, expecting 1"),
        ((0,), bytes(8), "unexpected number of string elements 1 for inference input 's' for the model, expecting 0"),
        ((1,), bytes(6), "incomplete string length indicator for .* expecting 4 bytes but only 2 bytes available"),
        ((2,), bytes(6), "incomplete string length indicator for .* expecting 4 bytes but only 2 bytes available"),
        ((2,), b"\x04\x00\x00\x00abcdx", "incomplete string length indicator for .* but only 1 bytes available"),
        (
            (1,),
            b"\x05\x00\x00\x00ab",
            "incomplete string data for inference input 's', expecting string of length 5 but only 2 bytes available",
        ),
    ],
)
def test_broken_bytes_tensors_say_what_is_wrong(shape: tuple[int, ...], raw: bytes, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{told}"):
        tensor_from_bytes("s", Datatype.BYTES, shape, raw)


def test_a_wrong_byte_count_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"input byte size mismatch for .* Expected 24, got 20: its shape is \[2, 3\] of FP32",
    ):
        tensor_from_bytes("x", Datatype.FP32, (2, 3), bytes(20))

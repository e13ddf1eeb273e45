from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelserver.cache.store import RequestKey, input_size, make_key
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor


def request(*arrays: np.ndarray[Any, Any], names: str = "AB", **fields: Any) -> InFlightRequest:
    tensors = [
        Tensor(name, Datatype.BYTES if array.dtype == object else Datatype.from_numpy(array.dtype), array)
        for name, array in zip(names, arrays, strict=False)
    ]
    return InFlightRequest(model_name="m", version=None, inputs={tensor.name: tensor for tensor in tensors}, **fields)


def digest(sent: InFlightRequest, generation: bytes = b"g") -> bytes:
    return make_key(sent, generation).digest


ONES = np.ones((2, 8), np.int32)


def test_what_no_answer_depends_on_is_not_in_the_key() -> None:
    same = request(ONES.copy(), id="x", priority=3, timeout_us=7, deadline_ns=1 << 60)
    assert digest(request(ONES)) == digest(same)


def test_inputs_may_come_in_any_order() -> None:
    sent = request(ONES, ONES * 2)
    turned = InFlightRequest(model_name="m", version=None, inputs=dict(reversed(sent.inputs.items())))
    assert digest(sent) == digest(turned)


def test_arrays_that_are_not_contiguous_are_read_in_their_order() -> None:
    array = np.arange(16, dtype=np.int32).reshape(4, 4)
    assert digest(request(array.T)) == digest(request(array.T.copy()))
    assert digest(request(array.T)) != digest(request(array))


@pytest.mark.parametrize(
    "other",
    [
        request(ONES.reshape(4, 4)),
        request(ONES.view(np.uint32)),
        request(ONES, names="B"),
        request(ONES * 2),
        request(ONES, outputs=("OUT",)),
        request(ONES, parameters={"a": 1}),
        request(ONES, parameters={"a": True}),
        request(ONES, parameters={"a": 1.0}),
        request(ONES, parameters={"a": "1"}),
        request(ONES, sequence_id=1),
        request(ONES, sequence_start=True),
    ],
    ids=["shape", "datatype", "name", "bytes", "outputs", "int", "bool", "float", "text", "sequence", "start"],
)
def test_all_else_is(other: InFlightRequest) -> None:
    assert digest(request(ONES)) != digest(other)


def test_parameters_of_different_types_are_different() -> None:
    values = (1, True, 1.0, "1")
    assert len({digest(request(ONES, parameters={"a": value})) for value in values}) == len(values)


def test_another_generation_is_another_model() -> None:
    assert digest(request(ONES), b"1") != digest(request(ONES), b"2")


@pytest.mark.parametrize(
    ("some", "others"), [([b"ab", b"c"], [b"a", b"bc"]), ([b"", b"a"], [b"a", b""]), ([b"a"], [b"b"])]
)
def test_elements_of_bytes_do_not_run_together(some: list[bytes], others: list[bytes]) -> None:
    assert digest(request(np.array(some, object))) != digest(request(np.array(others, object)))


def test_parts_do_not_run_together() -> None:
    assert RequestKey(b"g", b"h", [b"ab", b"c"]).digest != RequestKey(b"g", b"h", [b"a", b"bc"]).digest
    assert RequestKey(b"gh", b"", [b""]).digest != RequestKey(b"g", b"h", [b""]).digest


def test_equality_needs_more_than_the_digest() -> None:
    key, other = make_key(request(ONES), b"g"), make_key(request(ONES * 2), b"g")
    other.digest = key.digest
    assert key.is_equal(key.head, key.check)
    assert not key.is_equal(other.head, other.check)
    assert not key.is_equal(b"another head", key.check)


def test_input_size() -> None:
    assert input_size(request(ONES, ONES)) == 2 * ONES.nbytes

from __future__ import annotations

import numpy as np
import pytest

from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse, RowResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.execution.process.packing import Payload, RowRecords, rows_of, unpack

RANDOM = np.random.default_rng(1)
NUMERIC = [datatype for datatype in Datatype if datatype is not Datatype.BYTES]
BYTES_ELEMENTS = [b"", b"a", "é".encode(), b"\0\0", b"x" * 70_000, b"tail\0"]


def roundtrip(*tensors: Tensor, joined: bool) -> list[Tensor]:
    payload = Payload()
    records = [payload.add(tensor) for tensor in tensors]
    if joined:
        content: bytearray | np.ndarray = bytearray(payload.join())
    else:
        content = np.zeros(payload.nbytes, np.uint8)
        payload.write(content)
    return [unpack(record, content) for record in records]


def elements(*items: object, shape: tuple[int, ...] = (-1,)) -> np.ndarray:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (2, 0, 3), (1,)])
@pytest.mark.parametrize("datatype", NUMERIC)
def test_numeric_tensors_come_back(datatype: Datatype, shape: tuple[int, ...], joined: bool) -> None:
    raw = RANDOM.integers(0, 2 if datatype is Datatype.BOOL else 100, shape)
    (back,) = roundtrip(Tensor("x", datatype, np.asarray(raw, datatype.numpy)), joined=joined)
    assert (back.name, back.datatype, back.shape) == ("x", datatype, shape)
    np.testing.assert_array_equal(back.data, raw)
    assert back.data.dtype == datatype.numpy
    assert back.data.flags.writeable


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
def test_bytes_tensors_come_back(shape: tuple[int, ...], joined: bool) -> None:
    data = elements(*BYTES_ELEMENTS, shape=shape)
    (back,) = roundtrip(Tensor("x", Datatype.BYTES, data), joined=joined)
    assert back.shape == shape
    assert back.data.ravel().tolist() == BYTES_ELEMENTS


@pytest.mark.parametrize("shape", [(0,), (0, 4), ()])
def test_bytes_tensors_of_no_or_one_element(shape: tuple[int, ...]) -> None:
    data = np.full(shape, b"only", dtype=object)
    (back,) = roundtrip(Tensor("x", Datatype.BYTES, data), joined=True)
    assert back.shape == shape
    assert back.data.ravel().tolist() == data.ravel().tolist()


def test_several_tensors_do_not_disturb_each_other() -> None:
    tensors = [
        Tensor("odd", Datatype.UINT8, np.arange(13, dtype=np.uint8)),
        Tensor("text", Datatype.BYTES, elements("grüße", bytearray(b"b"))),
        Tensor("wide", Datatype.FP64, np.arange(6, dtype=np.float64)[::2]),
        Tensor("fortran", Datatype.INT32, np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))),
    ]
    for joined in (True, False):
        back = roundtrip(*tensors, joined=joined)
        assert back[0].data.tolist() == list(range(13))
        assert back[1].data.tolist() == ["grüße".encode(), b"b"]
        assert back[2].data.tolist() == [0.0, 2.0, 4.0]
        assert back[3].data.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("element", [7, None, ["a"], 1.5])
def test_an_element_that_is_no_bytes_is_named(element: object) -> None:
    with pytest.raises(InvalidArgumentError, match="tensor 'x': element 1 of a BYTES tensor must be bytes or str"):
        Payload().add(Tensor("x", Datatype.BYTES, elements(b"fine", element)))


def test_rows_of_one_message_keep_the_order_of_each_request() -> None:
    datatypes = {"a": Datatype.BYTES, "b": Datatype.INT32}

    def row(number: int, kind: str) -> InferResponse:
        if kind == "tensor":
            return InferResponse([])
        return RowResponse(values={name: number if name == "b" else f"é{number}" for name in kind}, datatypes=datatypes)

    # Of each request, what it sends; those that may not overtake another travel beside the rows.
    sent = {1: ["ab", "ab"], 2: ["b", "ab", "b"], 3: ["tensor", "ab"], 4: ["ab", "tensor", "ab"], 5: ["b"]}
    records = RowRecords([])
    beside = [
        (request, place)
        for place in range(3)
        for request, own in sent.items()
        if place < len(own) and not records.take(request, row(place, own[place]))
    ]
    assert beside == [(3, 0), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]
    found = [(number, response.values) for record in records.records for number, response in rows_of(record)]
    assert found == [
        (1, {"a": "é0", "b": 0}),
        (4, {"a": "é0", "b": 0}),
        (1, {"a": "é1", "b": 1}),
        (2, {"b": 0}),
        (5, {"b": 0}),
    ]
    (tensors, *_) = [response.outputs for record in records.records for _, response in rows_of(record)]
    assert [(tensor.datatype, tensor.data.tolist()) for tensor in tensors] == [
        (Datatype.BYTES, ["é0".encode()]),
        (Datatype.INT32, [0]),
    ]

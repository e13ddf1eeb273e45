from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, request, tensor

from modelserver.config.schema import (
    ModelSequenceBatching,
    SequenceControl,
    SequenceControlInput,
    SequenceControlKind,
    SequenceInitialState,
    SequenceState,
)
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.request import SequenceState as KeptState
from modelserver.core.response import InferResponse
from modelserver.errors import ConfigError, InternalError
from modelserver.execution.sequence_inputs import SequenceInputs

START, READY, END, CORRELATION_ID = SequenceControlKind


def made(directory: Path = Path(), *, max_batch_size: int = 4, **batching: Any) -> SequenceInputs:
    config = batching_config(max_batch_size, sequence_batching=ModelSequenceBatching(**batching))
    return SequenceInputs(config, directory)


def injected(inputs: SequenceInputs, *requests: InFlightRequest) -> list[list[Any]]:
    """The values of `C` in each request."""
    inputs.inject(requests)
    return [sent.inputs["C"].data.tolist() for sent in requests]


def control(kind: SequenceControlKind, **values: Any) -> dict[str, Any]:
    return {"control_input": (SequenceControlInput("C", (SequenceControl(kind, **values),)),)}


@pytest.mark.parametrize(
    ("values", "datatype"),
    [
        ({"int32_false_true": (5, 7)}, Datatype.INT32),
        ({"fp32_false_true": (0.5, 1.5)}, Datatype.FP32),
        ({"bool_false_true": (False, True)}, Datatype.BOOL),
    ],
)
def test_flags_have_the_values_of_the_config(values: dict[str, Any], datatype: Datatype) -> None:
    ((no, yes),) = values.values()
    plain, first, last = request(), request(sequence_start=True), request(sequence_end=True)
    padding = request(is_padding=True)
    assert injected(made(**control(START, **values)), plain, first, last, padding) == [[[no]], [[yes]], [[no]], [[no]]]
    assert injected(made(**control(END, **values)), plain, first, last, padding) == [[[no]], [[no]], [[yes]], [[no]]]
    assert injected(made(**control(READY, **values)), plain, padding) == [[[yes]], [[no]]]
    assert plain.inputs["C"].datatype is datatype
    assert plain.inputs["C"].data.dtype == datatype.numpy


def test_without_a_batch_dimension_a_control_has_one_element() -> None:
    inputs = made(max_batch_size=0, **control(START, int32_false_true=(0, 1)))
    assert injected(inputs, request(sequence_start=True)) == [[1]]


@pytest.mark.parametrize(
    ("datatype", "sequence_id", "expected"),
    [
        (Datatype.UINT64, 2**64 - 1, 2**64 - 1),
        (Datatype.INT64, 7, 7),
        (Datatype.UINT32, 2**32 + 5, 5),
        (Datatype.INT32, 7, 7),
        (Datatype.BYTES, 7, b"7"),
        (Datatype.BYTES, "name", b"name"),
        (Datatype.UINT64, 0, 0),
        (Datatype.BYTES, 0, b""),
    ],
)
def test_the_correlation_id_has_the_datatype_of_the_config(
    datatype: Datatype, sequence_id: int | str, expected: int | bytes
) -> None:
    inputs = made(**control(CORRELATION_ID, data_type=datatype))
    assert injected(inputs, request(sequence_id=sequence_id)) == [[[expected]]]


def test_a_text_is_a_number_of_its_own_where_the_model_wants_numbers() -> None:
    inputs = made(**control(CORRELATION_ID, data_type=Datatype.UINT32))
    one, again, other = injected(inputs, *(request(sequence_id=name) for name in ("one", "one", "other")))
    assert one == again != other


STATE = SequenceState("S_IN", "S_OUT", Datatype.INT32, (2,))


def sequence_request(**fields: Any) -> InFlightRequest:
    return request(state=KeptState(), **fields)


def test_a_state_goes_from_one_request_to_the_next() -> None:
    inputs = made(state=(STATE,))
    one, two = sequence_request(sequence_start=True), sequence_request(sequence_start=True)
    inputs.inject([one, two])
    assert one.inputs["S_IN"].data.tolist() == [[0, 0]]
    inputs.keep_rows([one, two], {"S_OUT": np.array([[1, 2], [3, 4]], np.int32)})
    following = request(state=two.state)
    inputs.inject([following])
    assert following.inputs["S_IN"].data.tolist() == [[3, 4]]
    anew = request(state=two.state, sequence_start=True)
    inputs.inject([anew])
    assert anew.inputs["S_IN"].data.tolist() == [[0, 0]]


def test_padding_has_states_of_the_shape_of_the_others() -> None:
    inputs = made(state=(SequenceState("S_IN", "S_OUT", Datatype.INT32, (-1,)),))
    first, padding = sequence_request(sequence_start=True), request(is_padding=True)
    inputs.inject([padding, first])
    assert first.inputs["S_IN"].shape == padding.inputs["S_IN"].shape == (1, 1)
    inputs.keep_rows([padding, first], {"S_OUT": np.ones((2, 3), np.int32)})
    inputs.inject([padding, following := request(state=first.state)])
    assert following.inputs["S_IN"].shape == padding.inputs["S_IN"].shape == (1, 3)


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({}, "is missing"),
        ({"S_OUT": np.zeros((1, 2), np.int64)}, "has dtype int64, expected int32"),
        ({"S_OUT": np.zeros((2, 2), np.int32)}, "expected 1 rows"),
        ({"S_OUT": np.zeros((1, 3), np.int32)}, r"has items of shape \[3\], expected \[2\]"),
    ],
)
def test_a_state_that_is_not_as_the_config_says_fails_the_batch(outputs: dict[str, Any], problem: str) -> None:
    with pytest.raises(InternalError, match=problem):
        made(state=(STATE,)).keep_rows([sequence_request()], outputs)


def test_states_leave_the_response_unless_they_are_outputs_too() -> None:
    shown = SequenceState("T_IN", "OUT", Datatype.FP32, (-1,))
    inputs = made(state=(STATE, shown))
    sent = sequence_request(sequence_start=True)
    state = tensor("S_OUT", np.ones((1, 2), np.int32))
    response = InferResponse([state, tensor("OUT", np.ones((1, 1), np.float32))])
    inputs.keep_outputs(sent, response)
    assert [output.name for output in response.outputs] == ["OUT"]
    assert sent.state is not None
    assert sorted(sent.state.arrays) == ["S_IN", "T_IN"]


def test_an_initial_state_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "data").write_bytes(np.array([8, 9], np.int32).tobytes())
    initial = SequenceInitialState(Datatype.INT32, (2,), None, "data", "start")
    state = SequenceState("S_IN", "S_OUT", Datatype.INT32, (-1,), (initial,))
    sent = sequence_request(sequence_start=True)
    made(tmp_path, state=(state,)).inject([sent])
    assert sent.inputs["S_IN"].data.tolist() == [[8, 9]]


@pytest.mark.parametrize(("content", "problem"), [(None, "No such file"), (b"1234", "Expected 8, got 4")])
def test_an_initial_state_that_cannot_be_read_fails_the_load(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    (tmp_path / "initial_state").mkdir()
    if content is not None:
        (tmp_path / "initial_state" / "data").write_bytes(content)
    initial = SequenceInitialState(Datatype.INT32, (2,), None, "data", "start")
    with pytest.raises(ConfigError, match=f"initial_state 'start'.*{problem}"):
        made(tmp_path, state=(SequenceState("S_IN", "S_OUT", Datatype.INT32, (2,), (initial,)),))

from __future__ import annotations

from typing import Any

import pytest

from modelserver.core.request import InFlightRequest
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.request_parameters import apply_parameters, size_parameter


def _apply(**parameters: Any) -> tuple[InFlightRequest, bool]:
    request = InFlightRequest(model_name="m", version=None, inputs={})
    return request, apply_parameters(request, parameters)


def test_reserved_parameters_set_fields() -> None:
    request, is_binary = _apply(
        sequence_id=7, sequence_start=True, sequence_end=False, priority=2, timeout=1000, binary_data_output=True
    )
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (7, True, False)
    assert (request.priority, request.timeout_us, is_binary) == (2, 1000, True)
    assert dict(request.parameters) == {}


def test_a_sequence_may_be_named_by_text() -> None:
    assert _apply(sequence_id="a")[0].sequence_id == "a"


def test_other_parameters_travel_to_the_model() -> None:
    values = {"a": 1, "b": 1.5, "c": "x", "d": False, "e": -(2**63), "f": 2**64 - 1}
    request, is_binary = _apply(**values)
    assert dict(request.parameters) == values
    assert not is_binary


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_id", -1),
        ("sequence_id", True),
        ("sequence_id", 1.0),
        ("sequence_id", 2**64),
        ("sequence_start", 1),
        ("sequence_end", "true"),
        ("priority", -1),
        ("priority", "1"),
        ("timeout", 1.5),
        ("timeout", None),
        ("binary_data_output", 1),
        ("triton_anything", 1),
        ("x", None),
        ("x", [1]),
        ("x", {"a": 1}),
        ("x", 2**64),
        ("x", -(2**63) - 1),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{name}'"):
        _apply(**{name: value})


@pytest.mark.parametrize("value", [-1, True, "4", 1.0, 2**64])
def test_a_size_is_an_unsigned_integer(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"input 'a'.*'binary_data_size'"):
        size_parameter("input 'a'", {"binary_data_size": value}, "binary_data_size")


def test_a_size_may_be_absent() -> None:
    assert size_parameter("input 'a'", {}, "binary_data_size") is None
    assert size_parameter("input 'a'", {"binary_data_size": 0}, "binary_data_size") == 0

from __future__ import annotations

from typing import Any

import pytest

from modelserver.core.request import InFlightRequest, RegionSlice
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.grpc.head import (
    apply_parameters,
    class_count,
    encode_parameter,
    parameter_fields,
    region_slice,
)
from modelserver.pb import grpc_service_pb2 as pb


def apply(**parameters: pb.InferParameter) -> InFlightRequest:
    request = InFlightRequest(model_name="m", version=None, inputs={})
    apply_parameters(request, parameters)
    return request


def kind(**choice: Any) -> pb.InferParameter:
    return pb.InferParameter(**choice)


@pytest.mark.parametrize(
    ("choice", "value"),
    [
        ({"bool_param": False}, False),
        ({"int64_param": -3}, -3),
        ({"uint64_param": (1 << 64) - 1}, (1 << 64) - 1),
        ({"string_param": ""}, ""),
        ({"double_param": 0.5}, 0.5),
    ],
)
def test_free_parameters_keep_value_and_type(choice: dict[str, Any], value: Any) -> None:
    parameters = apply(mine=kind(**choice)).parameters
    assert parameters == {"mine": value}
    assert type(parameters["mine"]) is type(value)


@pytest.mark.parametrize(
    ("key", "choice", "attribute", "value"),
    [
        ("sequence_id", {"int64_param": 7}, "sequence_id", 7),
        ("sequence_id", {"uint64_param": 1 << 63}, "sequence_id", 1 << 63),
        ("sequence_id", {"string_param": "s"}, "sequence_id", "s"),
        ("sequence_start", {"bool_param": True}, "sequence_start", True),
        ("sequence_end", {"bool_param": True}, "sequence_end", True),
        ("priority", {"int64_param": 2}, "priority", 2),
        ("priority", {"uint64_param": 2}, "priority", 2),
        ("timeout", {"int64_param": 2000}, "timeout_us", 2000),
        ("timeout", {"uint64_param": 2000}, "timeout_us", 2000),
    ],
)
def test_reserved_keys_set_attributes(key: str, choice: dict[str, Any], attribute: str, value: Any) -> None:
    request = apply(**{key: kind(**choice)})
    assert getattr(request, attribute) == value
    assert request.parameters == {}


@pytest.mark.parametrize(
    ("key", "choice", "accepted"),
    [
        ("sequence_id", {"bool_param": True}, "int64_param or uint64_param or string_param"),
        ("sequence_start", {"int64_param": 1}, "bool_param"),
        ("sequence_end", {"string_param": "true"}, "bool_param"),
        ("priority", {"string_param": "1"}, "int64_param or uint64_param"),
        ("timeout", {"double_param": 1.0}, "int64_param or uint64_param"),
        ("triton_enable_empty_final_response", {"int64_param": 1}, "bool_param"),
    ],
)
def test_wrong_kind_names_the_accepted_ones(key: str, choice: dict[str, Any], accepted: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{key}' parameter, expected {accepted}, got {next(iter(choice))}"):
        apply(**{key: kind(**choice)})


def test_negative_priority_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="invalid value for 'priority', expected value >= 0, got -1"):
        apply(priority=kind(int64_param=-1))


@pytest.mark.parametrize(("key", "attribute"), [("sequence_id", "sequence_id"), ("timeout", "timeout_us")])
@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1])
def test_unsigned_numbers_may_arrive_as_negative_ones(key: str, attribute: str, value: int) -> None:
    """Triton's C++ client writes both keys as int64."""
    request = apply(**{key: kind(int64_param=value - (1 << 64))})
    assert getattr(request, attribute) == value


def test_parameter_without_value_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="parameter 'a' has no value"):
        apply(a=kind())


def test_other_triton_keys_are_reserved() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"starting with 'triton_' are reserved for Triton usage.*got 'triton_final"
    ):
        apply(triton_final_response=kind(bool_param=True))


@pytest.mark.parametrize("value", [True, False])
def test_the_one_triton_key_of_clients_does_not_reach_the_model(value: bool) -> None:
    request = apply(triton_enable_empty_final_response=kind(bool_param=value), mine=kind(int64_param=1))
    assert request.wants_empty_final is value
    assert request.parameters == {"mine": 1}


REGION = kind(string_param="r")
SIZE = kind(uint64_param=8)


def test_a_slice_of_a_region_has_an_offset_of_zero_unless_told() -> None:
    parameters = {"shared_memory_region": REGION, "shared_memory_byte_size": kind(int64_param=8)}
    assert region_slice("input 'x'", parameters) == RegionSlice("r", 0, 8)
    assert region_slice("input 'x'", parameters | {"shared_memory_offset": SIZE}) == RegionSlice("r", 8, 8)


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": REGION},
        {"shared_memory_region": SIZE, "shared_memory_byte_size": SIZE},
        {"shared_memory_region": REGION, "shared_memory_byte_size": REGION},
        {"shared_memory_region": REGION, "shared_memory_byte_size": kind(int64_param=-1)},
        {
            "shared_memory_region": REGION,
            "shared_memory_byte_size": SIZE,
            "shared_memory_offset": kind(bool_param=True),
        },
    ],
)
def test_what_is_no_slice_is_refused(parameters: dict[str, pb.InferParameter]) -> None:
    with pytest.raises(InvalidArgumentError, match="input 'x'"):
        region_slice("input 'x'", parameters)


def test_tensor_parameters_without_meaning_are_ignored() -> None:
    parameters = {"binary_data": kind(bool_param=True)}
    assert region_slice("input 'x'", parameters) is None
    assert class_count("output 'x'", parameters) == 0


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (True, "bool_param"),
        (1, "int64_param"),
        (-(1 << 63), "int64_param"),
        (1 << 63, "uint64_param"),
        (0.5, "double_param"),
        ("text", "string_param"),
    ],
)
def test_values_are_encoded_by_type(value: Any, field: str) -> None:
    parameter = encode_parameter(value)
    assert parameter.WhichOneof("parameter_choice") == field
    assert getattr(parameter, field) == value


def test_fields_are_those_of_a_response() -> None:
    response = pb.ModelInferResponse.FromString(parameter_fields({"a": 1, "b": "c"}))
    assert {key: value.WhichOneof("parameter_choice") for key, value in response.parameters.items()} == {
        "a": "int64_param",
        "b": "string_param",
    }

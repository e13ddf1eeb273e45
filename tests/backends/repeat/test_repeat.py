from __future__ import annotations

from pathlib import Path

import pytest

from modelserver.backend import Backend, BackendContext, ConfigError
from modelserver.backend.discovery import find_backend
from modelserver.config.pbtxt import parse_pbtxt

INPUTS = """
input [ { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] },
        { name: "DELAY", data_type: TYPE_UINT32, dims: [ -1 ] },
        { name: "WAIT", data_type: TYPE_UINT32, dims: [ 1 ] } ]
"""
OUTPUTS = """
output [ { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] }, { name: "IDX", data_type: TYPE_UINT32, dims: [ 1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


def make(name: str, text: str) -> Backend:
    config = parse_pbtxt(f'name: "m" backend: "{name}" {text}').config
    return find_backend(name)(BackendContext("m", 1, config, Path(), Path()))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (INPUTS + OUTPUTS + DECOUPLED + " max_batch_size: 4", "max_batch_size must be 0, not 4"),
        (OUTPUTS + DECOUPLED, r"expected tensors \['DELAY', 'IN', 'WAIT'\], got \[\]"),
        (INPUTS + DECOUPLED, r"expected tensors \['IDX', 'OUT'\], got \[\]"),
    ],
)
def test_what_a_config_lacks(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make("repeat", text)


def test_a_right_config() -> None:
    assert make("repeat", INPUTS + OUTPUTS + DECOUPLED).context.config.is_decoupled


def test_square_is_decoupled_too() -> None:
    with pytest.raises(ConfigError, match="decoupled: true"):
        make("square", "")

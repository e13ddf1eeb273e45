"""What documents of a server say of its model."""

from __future__ import annotations

from typing import Any

import pytest

from modelserver.bench.interface import Interface, make_interface, read_interface
from modelserver.client.server_client import ServerClient
from modelserver.core.datatype import Datatype
from modelserver.errors import InternalError, InvalidArgumentError, NotFoundError

METADATA = {
    "name": "m",
    "versions": ["2", "10"],
    "inputs": [
        {"name": "A", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "B", "datatype": "BYTES", "shape": ["-1", "1"]},
    ],
    "outputs": [{"name": "C", "datatype": "INT64", "shape": [-1, -1]}],
}


class FakeControl(ServerClient):
    """A server that knows one model; `config` None is one that tells no configs."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        super().__init__()
        self._config = config

    def index(self) -> list[dict[str, Any]]:
        return [{"name": "digits"}]

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        if model != "digits":
            raise NotFoundError(f"no model '{model}'")
        return METADATA

    def model_config(self, model: str, version: str = "") -> dict[str, Any]:
        if self._config is None:
            raise InternalError("Method not found")
        return self._config


def read(config: dict[str, Any] | None, name: str = "digits") -> Interface:
    return read_interface(FakeControl(config), name, "")


def test_the_dimension_of_the_batch_is_taken_away() -> None:
    found = read({"max_batch_size": 8, "input": [{"name": "B", "optional": True}]})
    assert [(spec.name, spec.datatype, spec.dims, spec.is_optional) for spec in found.inputs] == [
        ("A", Datatype.FP32, (3,), False),
        ("B", Datatype.BYTES, (1,), True),
    ]
    assert found.version == "10"
    assert (read({"max_batch_size": 0})).inputs[0].dims == (-1, 3)


def test_a_server_without_configs_is_taken_at_its_metadata() -> None:
    found = read(None)
    assert found.max_batch_size > 1000
    assert found.inputs[0].dims == (3,)


def test_kinds_of_models() -> None:
    config = {
        "model_transaction_policy": {"decoupled": True},
        "sequence_batching": {},
        "response_cache": {"enable": True},
        "ensemble_scheduling": {
            "step": [{"model_name": "a", "model_version": "-1"}, {"model_name": "b", "model_version": 2}]
        },
    }
    found = read(config)
    assert found.is_decoupled
    assert found.is_sequence
    assert found.has_cache
    assert found.composing == (("a", ""), ("b", "2"))


def test_inputs_by_name() -> None:
    found = make_interface("m", "", METADATA, {"max_batch_size": 4})
    assert found.input("A").name == "A"
    with pytest.raises(InvalidArgumentError, match="has no input 'a1'"):
        found.input("a1")

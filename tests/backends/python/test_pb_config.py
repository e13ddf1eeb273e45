from __future__ import annotations

from collections.abc import Callable

import pytest
from modelserver_backends.python.pb_config import ModelConfig

X = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}
CONFIGURED = {"name": "m", "max_batch_size": 4, "input": [X], "dynamic_batching": {"max_queue_delay_microseconds": 9}}


def test_an_empty_config_takes_everything() -> None:
    config = ModelConfig('{"name": "m"}')
    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    config.add_input({**X, "optional": True})
    config.add_output({**X, "name": "Y", "dims": (-1,)})
    config.set_model_transaction_policy({"decoupled": False})
    assert config.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "dynamic_batching": {},
        "input": [{**X, "optional": True}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
        "model_transaction_policy": {"decoupled": False},
    }


def test_what_is_configured_stays() -> None:
    config = ModelConfig(CONFIGURED)
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.add_input(X)
    assert config.as_dict() == CONFIGURED


def test_gaps_of_a_configured_tensor_are_filled() -> None:
    config = ModelConfig({"name": "m", "input": [{"name": "X", "data_type": "TYPE_INVALID", "dims": []}]})
    config.add_input({**X, "optional": True})
    assert config.as_dict()["input"] == [{**X, "optional": True}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.set_max_batch_size(2),
            "specified max_batch_size 4, but in auto-complete-config function for model .* max_batch_size 2",
        ),
        (lambda c: c.add_input({**X, "data_type": "TYPE_INT8"}), "expects datatype TYPE_FP32 .* provides TYPE_INT8"),
        (lambda c: c.add_input({**X, "dims": [5]}), r"expects dims \[5\] but the model configuration .* \[4\]"),
        (
            lambda c: c.add_input({**X, "shape": [4]}),
            "contains property other than 'name', .* and 'optional'. Got 'shape'",
        ),
        (
            lambda c: c.add_output({**X, "optional": True}),
            "output 'X' .* other than 'name', .* and 'dims'. Got 'optional'",
        ),
        (lambda c: c.add_input({"data_type": "TYPE_FP32", "dims": [4]}), "input in .* is missing 'name' property"),
        (lambda c: c.add_output({"name": "Y", "dims": [4]}), "output 'Y' .* is missing 'data_type' property"),
        (lambda c: c.add_output({"name": "Y", "data_type": "TYPE_FP32"}), "output 'Y' .* is missing 'dims' property"),
        (
            lambda c: c.set_model_transaction_policy({"coupled": 1}),
            "contains property other than 'decoupled'. Got 'coupled'",
        ),
        (lambda c: c.set_model_transaction_policy({}), "is missing 'decoupled' property"),
    ],
)
def test_contradictions_are_value_errors(change: Callable[[ModelConfig], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(ModelConfig({**CONFIGURED, "input": [dict(X)]}))


def test_schedulers_and_policies_do_not_change() -> None:
    config = ModelConfig({"name": "m", "sequence_batching": {}, "model_transaction_policy": {"decoupled": True}})
    with pytest.raises(ValueError, match="scheduling_choice as 'sequence_batching'"):
        config.set_dynamic_batching()
    with pytest.raises(ValueError, match="already set to 'True'"):
        config.set_model_transaction_policy({"decoupled": False})

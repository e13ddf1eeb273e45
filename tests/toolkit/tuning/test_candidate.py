"""A setting is read from a config, and written into one that says nothing else."""

import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.schema import ModelConfig
from modelserver.toolkit.tuning.space import Candidate, apply_candidate, changes, read_candidate

TEXT = """
backend: "onnxruntime" max_batch_size: 64
instance_group { count: 2 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 100 preferred_batch_size: [ 32, 64 ] priority_levels: 2 }
parameters { key: "intra_op_thread_count" value { string_value: "4" } }
parameters { key: "other" value { string_value: "stays" } }
"""


def config(text: str = TEXT) -> ModelConfig:
    return parse_pbtxt(text).config


def test_what_is_read_is_what_was_applied() -> None:
    own = read_candidate(config())
    assert own == Candidate(2, 64, 100, 4)
    assert apply_candidate(own, config()) == config()
    assert str(own) == "2 instances, 4 threads, batches up to 64, delay 100 us"
    for candidate in (Candidate(1, 64, None, 0), Candidate(3, 8, 0, 1), Candidate(2, 64, 500, 4)):
        assert read_candidate(apply_candidate(candidate, config())) == candidate


def test_the_rest_of_the_config_stays() -> None:
    changed = apply_candidate(Candidate(1, 8, 0, 0), config())
    assert changed.parameters == {"other": "stays"}
    assert changed.dynamic_batching is not None
    assert changed.dynamic_batching.priority_levels == 2
    assert changed.dynamic_batching.preferred_batch_size == ()
    assert apply_candidate(Candidate(1, 64, 0, 0), config()).dynamic_batching.preferred_batch_size == (32, 64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('backend: "identity"', Candidate(1, 0, None, None)),
        ('backend: "pytorch" max_batch_size: 4', Candidate(1, 4, None, 0)),
        ('backend: "onnxruntime" dynamic_batching { } max_batch_size: 4', Candidate(1, 4, 0, 0)),
    ],
)
def test_configs_that_say_less(text: str, expected: Candidate) -> None:
    assert read_candidate(config(text)) == expected
    assert "no batching" in str(Candidate())


def test_changes_are_told() -> None:
    assert list(changes(Candidate(1, 64, 0, 0), Candidate(2, 64, None, 0))) == [
        ("instances", "1", "2"),
        ("queue delay (us)", "0", "no batching"),
    ]

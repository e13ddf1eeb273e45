import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.repository.loader import config_changes

BASE = 'backend: "identity" max_batch_size: 8 input [ { name: "a" data_type: TYPE_FP32 dims: [ 2 ] } ]'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE, ()),
        (BASE.replace("8", "3"), ("max_batch_size: 8 -> 3",)),
        (BASE.replace("[ 2 ]", "[ 2, 4 ]"), ("input[0].dims: [2] -> [2,4]",)),
        (
            BASE + 'parameters { key: "k" value { string_value: "' + "v" * 99 + '" } }',
            ('parameters.k.string_value: (none) -> "' + "v" * 76 + "...",),
        ),
        (
            BASE + "dynamic_batching { max_queue_delay_microseconds: 5 }",
            ("dynamic_batching.default_priority_level: (none) -> 0",),
        ),
    ],
)
def test_each_field_that_differs_is_told(text: str, expected: tuple[str, ...]) -> None:
    changes = config_changes(parse_pbtxt(BASE).config, parse_pbtxt(text).config)
    assert changes[: len(expected)] == expected
    assert bool(changes) is bool(expected)

import pytest

from modelserver.config.pbtxt import read_pbtxt
from modelserver.config.problem import Problem, is_doubtful
from modelserver.errors import ConfigError


def test_only_what_is_wrong_is_left_out_of_what_is_read() -> None:
    text = "max_batch: 4 max_queue: 7 input { name: 'x' # comment\n data_type: FP32 dims: [ 2, y ] optional: true }"
    parsed = read_pbtxt(text + " version_policy { all { } } parameters { key: 'a' value { string_value: 'b' } }")
    assert parsed.config.max_batch_size == 4
    assert (parsed.config.input[0].name, parsed.config.input[0].optional) == ("x", True)
    assert (parsed.config.input[0].data_type, parsed.config.input[0].dims) == (None, ())
    assert parsed.config.version_policy is not None
    assert parsed.config.parameters == {"a": "b"}
    assert parsed.doubtful == {"max_queue", "input[0].data_type", "input[0].dims"}


def test_a_misspelt_field_is_found_under_its_right_name() -> None:
    assert read_pbtxt("\n max_batch_sze: 4").locations.find("max_batch_size") == (2, 2)


@pytest.mark.parametrize("text", ["input { name: 'x'", "input { } }", "input: 3 input { name: 'x' }", "@ name: 'x'"])
def test_text_whose_structure_is_broken_cannot_be_read_past(text: str) -> None:
    with pytest.raises(ConfigError):
        read_pbtxt(text)


@pytest.mark.parametrize(
    ("field", "message", "expected"),
    [
        ("input[0].dims", "expected at least one dimension", True),
        ("input[0].dims[1]", "expected a size", True),
        ("dynamic_batching.preferred_batch_size[0]", "expected none, because max_batch_size is 0", True),
        ("input[1].dims", "expected at least one size", False),
        ("name", "expected a name", False),
    ],
)
def test_what_may_follow_from_an_unread_field_is_doubtful(field: str, message: str, expected: bool) -> None:
    problem = Problem("config.pbtxt", 1, 1, field, message)
    assert is_doubtful(problem, {"input[0].dims", "max_batch_size"}) is expected

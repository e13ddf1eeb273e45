import time

import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.config_strategies import config_messages

from modelserver.config.message import config_from_message
from modelserver.config.pbtxt import MAX_CHARACTERS, MAX_PROBLEMS, parse_pbtxt
from modelserver.config.schema import InstanceGroupKind
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError

TYPICAL = """\
# A comment first.
name: "digits"
backend: "onnxruntime"
max_batch_size: 64
input [
  { name: "image" data_type: TYPE_FP32 dims: [ 8, 8 ] },
  {
    name: "mask"
    data_type: TYPE_STRING
    dims: -1
    dims: 2
    reshape: { shape: [ ] }
  }
]
output < name: "p", data_type: 11; dims: 10 >
instance_group [ { kind: KIND_CPU count: 2 } ]
dynamic_batching {
  max_queue_delay_microseconds: 100
  priority_queue_policy { key: 2 value: { max_queue_size: 0x10 } }
}
parameters: { value: { string_value: "a" 'b' } key: "in\\"tra" }
metric_tags { key: "team" value: "vision" }
version_policy: { all { } }
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_pbtxt(text)
    return [str(problem) for problem in caught.value.problems]


def is_read_or_refused(text: str) -> bool:
    """Whether the text has a config, or problems that all have a place; other exceptions pass through."""
    try:
        parse_pbtxt(text)
    except ConfigError as error:
        return bool(error.problems) and all(problem.line is not None for problem in error.problems)
    return True


def test_every_way_to_write_a_field_is_read() -> None:
    config = parse_pbtxt(TYPICAL).config
    assert [tensor.dims for tensor in config.input] == [(8, 8), (-1, 2)]
    assert config.input[1].data_type is Datatype.BYTES
    assert config.input[1].reshape is not None
    assert config.output[0].data_type is Datatype.FP32
    assert config.instance_group[0].kind is InstanceGroupKind.KIND_CPU
    assert config.dynamic_batching.priority_queue_policy[2].max_queue_size == 16
    assert config.parameters == {'in"tra': "ab"}
    assert config.version_policy.all is not None


@pytest.mark.parametrize(
    ("path", "position"),
    [
        ("name", (2, 1)),
        ("input", (5, 1)),
        ("input[0]", (6, 3)),
        ("input[0].dims[1]", (6, 51)),
        ("input[1].dims", (10, 5)),
        ("input[1].dims[1]", (11, 5)),
        ("input[1].reshape.shape", (12, 16)),
        ("output[0].name", (15, 10)),
        ("dynamic_batching.priority_queue_policy[2].max_queue_size", (19, 43)),
        ('parameters["in\\"tra"]', (21, 1)),
        ('metric_tags["team"]', (22, 1)),
        ('parameters["in\\"tra"].string_value', (21, 24)),
        # Fields that are not there: what is around them.
        ("input[0].reshape.shape[0]", (6, 3)),
        ("optimization.graph.level", None),
    ],
)
def test_locations(path: str, position: tuple[int, int] | None) -> None:
    assert parse_pbtxt(TYPICAL).locations.find(path) == position


@given(message=config_messages())
def test_what_protobuf_prints_is_read(message) -> None:
    for options in ({}, {"as_one_line": True}, {"pointy_brackets": True, "use_short_repeated_primitives": True}):
        text = text_format.MessageToString(message, **options)
        assert parse_pbtxt(text).config == config_from_message(message)


def test_source_is_named_in_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pbtxt("nam: 1\nbackned: 2", "repo/m/config.pbtxt")
    assert caught.value.message == (
        "repo/m/config.pbtxt: 2 problems\n"
        "  repo/m/config.pbtxt:1:1: nam: unknown field of ModelConfig; did you mean name?\n"
        "  repo/m/config.pbtxt:2:1: backned: unknown field of ModelConfig; did you mean backend?"
    )


def test_byte_order_mark_is_passed_over() -> None:
    assert parse_pbtxt('\ufeffname: "x"').config.name == "x"


def test_other_spaces_are_shown_as_what_they_are() -> None:
    assert problems_of('name:\xa0"x" max_batch_size = 3') == [
        "config.pbtxt:1:6: unexpected '\\xa0'",
        "config.pbtxt:1:26: unexpected '='",
        "config.pbtxt:1:28: max_batch_size: expected ':' after max_batch_size, got 3",
    ]


def test_strings_that_are_no_text_are_refused() -> None:
    assert "name" in problems_of('name: "\\377"')[0]


def test_bytes_that_are_no_text_are_refused() -> None:
    text = b'name: "x"\nbackend: "\xff"'.decode(errors="surrogateescape")
    assert problems_of(text) == ["config.pbtxt:2:11: expected UTF-8 text"]


def test_a_longer_text_than_any_config_is_refused() -> None:
    assert problems_of("#" * (MAX_CHARACTERS + 1)) == [
        f"config.pbtxt: expected at most {MAX_CHARACTERS} characters, got {MAX_CHARACTERS + 1}"
    ]


HOSTILE = {
    "deep braces": "a {" * 50_000,
    "deep known braces": "input {" * 50_000,
    "deep brackets": "input [" * 50_000,
    "closing": "}" * 50_000,
    "entries without keys": "parameters {" * 20_000,
    "unknown fields": "".join(f"max_batch_siz{i}: 1\n" for i in range(20_000)),
    "numbers": "max_batch_size: " + "9" * 100_000,
    "digits with underscores": "max_batch_size: 1_000",
    "quotes": "'\"" * 50_000,
    "escapes": 'name: "' + "\\" * 100_001,
    "one long list": "input { dims: [" + "x," * 50_000,
    "junk": "\0\x01☃" * 20_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_text_is_refused_in_bounded_time(text: str) -> None:
    start = time.process_time()
    problems = problems_of(text)
    assert 1 <= len(problems) <= MAX_PROBLEMS
    # Some tenths of a second; what grows with the square of the length takes minutes.
    assert time.process_time() - start < 10.0


PIECES = [
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    ":",
    ",",
    ";",
    '"',
    "'",
    "\\",
    "#",
    "\n",
    "-",
    "0",
    "key",
    "value",
    "input",
    "x",
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(TYPICAL)), st.integers(0, 6), st.sampled_from(PIECES) | st.text(max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_damaged_configs_raise_nothing_but_config_errors(edits: list[tuple[int, int, str]]) -> None:
    text = TYPICAL
    for position, length, insert in edits:
        text = text[:position] + insert + text[position + length :]
    assert is_read_or_refused(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join))
def test_any_text_raises_nothing_but_config_errors(text: str) -> None:
    assert is_read_or_refused(text)

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.core.json_pieces import check_depth
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.json_tensor import (
    as_finite,
    has_more_members,
    has_non_finite,
    parse_non_finite,
    with_non_finite,
)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100 + b"]" * 100,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b"[[]," * 99 + b"1" + b"]" * 99,
        b'["' + b"[" * 500 + b'"]',
        b'["' + b'\\"[' * 500 + b'"]',
        b"[" + b"[1]," * 1000 + b"[2]]",
        b'["\\\\", ' + b"[1]," * 200 + b"1]",
    ],
)
def test_depth_within_the_limit(text: bytes) -> None:
    check_depth(text, 100)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 101 + b"]" * 101,
        b"[" * 100000,
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b'["x", ' * 101,
        b'["\\\\", ' + b"[" * 100,
        bytearray(b" " * (3 << 20) + b"[{" * 60),
    ],
)
def test_depth_over_the_limit(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        check_depth(text, 100)


@pytest.mark.parametrize("text", [b'"' + b'\\"' * 500_000, b'"' + b'\\"' * 500_000 + b"\\", b'"\\' * 500_000])
def test_strings_that_never_end_cost_no_more_than_their_length(text: bytes) -> None:
    start_s = time.thread_time()
    check_depth(b"[]" * 101 + text, 100)
    # Milliseconds; what grows with the square of the length takes minutes.
    assert time.thread_time() - start_s < 10


@given(st.recursive(st.text('[]{}"\\a'), lambda inner: st.lists(inner, max_size=3), max_leaves=30))
def test_depth_is_that_of_the_document(document: object) -> None:
    import json

    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    text, levels = json.dumps(document).encode(), depth(document)
    check_depth(text, levels)
    if levels:
        with pytest.raises(InvalidArgumentError):
            check_depth(text, levels - 1)


@given(st.dictionaries(st.text(), st.text() | st.integers(), min_size=1))
def test_members_of_an_object_are_counted(members: dict[str, str | int]) -> None:
    text = json.dumps(members, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert not has_more_members(text, len(members))
    assert len(members) == 1 or has_more_members(text, len(members) - 1)


def test_non_finite_tokens_are_parsed() -> None:
    text = b'{"data": [NaN, Infinity, -Infinity, 1.5], "id": "NaN \\ud83d\\ude00"}'
    assert has_non_finite(text)
    document = parse_non_finite(text)
    assert math.isnan(document["data"][0])
    assert document["data"][1:] == [math.inf, -math.inf, 1.5]
    assert document["id"] == "NaN \N{GRINNING FACE}"


def test_what_is_counted_has_zeros_for_non_finite_tokens() -> None:
    text = b'{"a": [NaN,-Infinity,Infinity], "NaN \\" Infinity": "NaN", "b": NaN}'
    finite = as_finite(text)
    assert len(finite) == len(text)
    assert json.loads(finite) == {"a": [0, 0, 0], 'NaN " Infinity': "NaN", "b": 0}
    assert as_finite(b'["NaN') == b'["NaN', "strings that do not end"
    assert as_finite(b'"' * 100_001 + b"NaN") == b'"' * 100_001 + b"NaN"


@pytest.mark.parametrize(
    "text", [b"[NaN", b"[NaN, nan]", b"\xff NaN", b'{"a": NaN, "id": "\\ud800"}', b"[NaN, " + b"1" * 5000 + b"]"]
)
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="malformed"):
        parse_non_finite(text)


def test_non_finite_numbers_are_written_as_bare_tokens() -> None:
    numbers = np.array([math.nan, math.inf, -math.inf, 1.5, 2.0])
    assert with_non_finite(b"[null,null,null,1.5,2.0]", numbers) == b"[NaN,Infinity,-Infinity,1.5,2.0]"

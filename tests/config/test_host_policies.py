from __future__ import annotations

import pytest

from modelserver.config.resources import HostPolicy, parse_cores, parse_host_policies
from modelserver.errors import InvalidArgumentError


def test_settings_of_a_policy_belong_together() -> None:
    assert parse_host_policies(("a,numa-node=1", "b,cpu-cores=0-2,8", "a,cpu-cores=4")) == (
        HostPolicy("a", frozenset({4}), 1),
        HostPolicy("b", frozenset({0, 1, 2, 8})),
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("a",), "option format is"),
        ((",numa-node=1",), "option format is"),
        (("a,numa-node",), "option format is"),
        (("a,numa=1",), "got 'numa'"),
        (("a,numa-node=x",), "the number of a node, got 'x'"),
        (("a,cpu-cores=1-",), "numbers and ranges"),
        (("a,cpu-cores=3-1",), "numbers and ranges"),
        (("a,cpu-cores=",), "numbers and ranges"),
        (("a,numa-node=1", "a,numa-node=2"), "given twice"),
    ],
)
def test_what_is_wrong_is_named(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_host_policies(texts)


def test_lists_of_cores() -> None:
    assert parse_cores("7") == {7}
    assert parse_cores("0-1,3,5-6") == {0, 1, 3, 5, 6}

from __future__ import annotations

import pytest

from modelserver.config.resources import ResourceLimit, parse_resource_limits
from modelserver.errors import InvalidArgumentError


def test_limits_of_all_devices_and_of_one() -> None:
    assert parse_resource_limits(("R:2", "R:3:1", "S:0")) == (
        ResourceLimit("R", 2),
        ResourceLimit("R", 3, 1),
        ResourceLimit("S", 0),
    )


@pytest.mark.parametrize("text", ["", "R", "R:", "R:x", ":1", "R:-1", "R:1:2:3", "R:1:x"])
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="option format is"):
        parse_resource_limits((text,))


def test_twice_is_once_too_often() -> None:
    with pytest.raises(InvalidArgumentError, match="given twice"):
        parse_resource_limits(("R:1:0", "R:2:0"))

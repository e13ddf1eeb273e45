"""Loads that models ask for while they are loaded."""

from __future__ import annotations

import pytest

from modelserver.app.server_calls import LoadDeadlocks
from modelserver.errors import UnavailableError


def test_a_load_that_would_wait_for_itself_is_refused() -> None:
    waits = LoadDeadlocks()
    with waits.wait("a", "b"), waits.wait("a", "b"), waits.wait("b", "c"):
        for loading, name, chain in (("c", "a", "c -> a -> b -> c"), ("c", "b", "c -> b -> c"), ("c", "c", "c -> c")):
            refused = pytest.raises(UnavailableError, match=f"'{name}' is being loaded, and waits for this .{chain}.:")
            with refused, waits.wait(loading, name):
                raise AssertionError("it was let through")
        with waits.wait("c", "d"), waits.wait("", "a"):
            pass


def test_what_has_ended_is_waited_for_no_more() -> None:
    waits = LoadDeadlocks()
    with pytest.raises(ValueError, match="the load failed"), waits.wait("a", "b"):
        raise ValueError("the load failed")
    with waits.wait("b", "a"):
        pass

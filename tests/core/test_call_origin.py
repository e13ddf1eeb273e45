"""Requests of models that would wait for themselves."""

from __future__ import annotations

import pytest

from modelserver.core.request import CallOrigin, check_has_free_instance
from modelserver.errors import UnavailableError

FIRST, SECOND, OTHER = CallOrigin("a_0", "a", 2), CallOrigin("a_1", "a", 2), CallOrigin("b_0", "b", 1)


@pytest.mark.parametrize("origins", [(), (FIRST,), (FIRST, OTHER, FIRST), (OTHER, SECOND), (CallOrigin("a_0"),)])
def test_a_call_goes_through_while_an_instance_is_free(origins: tuple[CallOrigin, ...]) -> None:
    check_has_free_instance("a", origins)


@pytest.mark.parametrize(
    ("origins", "chain"), [((FIRST, SECOND), "a -> a -> a"), ((OTHER, SECOND, OTHER, FIRST), "b -> a -> b -> a -> a")]
)
def test_a_call_that_all_instances_wait_for_is_refused(origins: tuple[CallOrigin, ...], chain: str) -> None:
    with pytest.raises(UnavailableError, match=rf"all its 2 instances wait for the answer \({chain}\); give it more"):
        check_has_free_instance("a", origins)

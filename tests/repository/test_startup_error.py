from __future__ import annotations

import pytest

from modelserver.errors import InternalError
from modelserver.repository.lifecycles import StartupError


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("a", "1 model could not be loaded (--exit-on-error=false starts without it):\n  a: broken"),
        ("ab", "2 models could not be loaded (--exit-on-error=false starts without them):\n  a: broken\n  b: broken"),
    ],
)
def test_the_models_are_counted_and_named(names: str, said: str) -> None:
    assert StartupError(dict.fromkeys(names, InternalError("broken"))).message == said

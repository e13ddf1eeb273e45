"""Tests that must hold on each event loop that the server may run on."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on asyncio's own loop and on uvloop. Its fixtures must not be async."""

    @functools.wraps(test)
    def run(*arguments: Any, loop_name: str, **named: Any) -> None:
        with asyncio.Runner(loop_factory=_FACTORIES[loop_name]) as runner:
            runner.run(test(*arguments, **named))

    signature = inspect.signature(test)
    loop_name = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*signature.parameters.values(), loop_name]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop_name", list(_FACTORIES))(run)

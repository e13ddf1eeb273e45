"""One function called in a child process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.backend import InternalError
from modelserver.execution.child_process import ChildProcess
from modelserver.execution.recipe import Recipe


def call_in_process(
    name: str, recipe: Recipe, *, timeout_s: float, environment: Mapping[str, str], interpreter: str = ""
) -> Any:
    """What the recipe's function returns when a child process of its own calls it.

    Blocks. Raises the ServerError that the function raised, or InternalError when it dies or takes too long.
    """
    try:
        child = ChildProcess(name, environment, interpreter=interpreter)
    except OSError as error:
        raise InternalError(f"cannot start a process for {name}: {error}") from error
    try:
        return child.begin(recipe.message(is_call=True), timeout_s).result
    finally:
        child.kill()
        while child.exit_report is None:
            child.watch()
        child.channel.close()

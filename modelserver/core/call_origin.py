"""Which instances wait for the answer to a model's request, to detect requests that would wait for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Who calls: an instance, and its model with the number of its instances."""

    instance: str
    model: str = ""
    num_instances: int = 0


def check_has_free_instance(model: str, origins: Sequence[CallOrigin]) -> None:
    """Refuse a call of a model if all of its instances already wait for the answer: the call would never end.

    `origins` are the waiting callers, outermost first. Raises UnavailableError.
    """
    waiting = {caller.instance for caller in origins if caller.model == model}
    limits = [caller.num_instances for caller in origins if caller.model == model]
    if waiting and len(waiting) >= limits[-1] > 0:
        chain = " -> ".join([*(caller.model for caller in origins), model])
        raise UnavailableError(
            f"calling model '{model}' would wait for ever: all its {limits[-1]} instances wait for "
            f"the answer ({chain}); give it more instances (instance_group), or do not call in a circle"
        )

"""Whether a model is executed on the event loop itself: what its config asks for, and what is measured.

There a lone request crosses no thread, but whatever else the server does waits for it: so only models whose backend
declares it, or whose config asks for it, and under a budget.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from modelserver.backend import Backend, DeviceKind
from modelserver.config.instance_rules import INLINE_EXECUTION, InlineExecution, inline_execution
from modelserver.config.signature import ModelSignature
from modelserver.core.tensor import Tensor
from modelserver.errors import ConfigError, ServerError
from modelserver.execution.inline_guard import INLINE_BUDGET_NS
from modelserver.execution.instances import LoadedInstance
from modelserver.execution.probe import execute_probe
from modelserver.execution.warmup import probe_inputs, probe_request

logger = logging.getLogger(__name__)

_NUM_UNTIMED = 3
_NUM_TIMED = 40
# A measurement that is over the budget is repeated: something else may have run meanwhile.
_NUM_ATTEMPTS = 3
# An execution this many times over the budget ends the measurement at once.
_HOPELESS = 25


def decide_inline(backend: Backend, instances: Sequence[LoadedInstance], signature: ModelSignature) -> bool:
    """Whether the instances shall be executed on the event loop. Blocking if that has to be measured.

    Raises ConfigError when the config demands what the backend cannot do.
    """
    context = backend.context
    if context.config.sequence_batching is not None:
        return False  # a sequence stays with its instance, which could not leave the loop while one is under way
    what = f"model '{context.model_name}' version {context.version}"
    can_run_inline = backend.runs_inline or backend.can_run_inline
    match inline_execution(context.config):
        case None:
            return backend.runs_inline
        case InlineExecution.NEVER:
            return False
        case InlineExecution.ALWAYS:
            if not can_run_inline:
                raise ConfigError(
                    f"model '{context.model_name}': parameter {INLINE_EXECUTION}: the backend "
                    f"'{context.config.backend}' cannot be called on the event loop; use never or auto"
                )
            logger.info("%s is executed on the event loop, as its config demands", what)
            return True
        case InlineExecution.AUTO:
            problem = (
                _find_problem(instances, backend, signature)
                if can_run_inline
                else f"the backend '{context.config.backend}' cannot be called on the event loop"
            )
            if problem is not None:
                logger.info("%s is executed by worker threads: %s", what, problem)
            return problem is None


def _find_problem(instances: Sequence[LoadedInstance], backend: Backend, signature: ModelSignature) -> str | None:
    """Why the instances are not fast enough for the event loop; None when they are, which is logged."""
    context = backend.context
    active = [loaded for loaded in instances if not loaded.plan.is_passive]
    elsewhere = [loaded.name for loaded in active if loaded.plan.placement.kind is not DeviceKind.CPU]
    if elsewhere:
        return f"instance '{elsewhere[0]}' is not on a CPU"
    worst_ns = 0
    try:
        probes = probe_inputs(context.config, signature, context.model_directory)
        for loaded in active:
            for inputs in probes:
                worst_ns = max(worst_ns, _measure(loaded, signature, inputs))
    except ServerError as error:
        return f"it failed when it was measured: {error.message}"
    measured = f"95 % of {_NUM_TIMED} executions took up to {worst_ns / 1000:.0f} us"
    budget = f"the budget is {INLINE_BUDGET_NS // 1000} us"
    if worst_ns > INLINE_BUDGET_NS:
        return f"{measured}, {budget}"
    logger.info(
        "model '%s' version %d is executed on the event loop: %s, %s",
        context.model_name,
        context.version,
        measured,
        budget,
    )
    return None


def _measure(loaded: LoadedInstance, signature: ModelSignature, inputs: Sequence[Tensor]) -> int:
    """The time in ns that 95 % of executions take at most, in the best of some attempts. Raises ServerError."""
    for _ in range(_NUM_UNTIMED):
        if _execute(loaded, signature, inputs) > _HOPELESS * INLINE_BUDGET_NS:
            break
    best_ns = 0
    for attempt in range(_NUM_ATTEMPTS):
        durations_ns = []
        for _ in range(_NUM_TIMED):
            duration_ns = _execute(loaded, signature, inputs)
            if duration_ns > _HOPELESS * INLINE_BUDGET_NS:
                return duration_ns
            durations_ns.append(duration_ns)
        at_most_ns = sorted(durations_ns)[int(0.95 * (_NUM_TIMED - 1))]
        best_ns = at_most_ns if attempt == 0 else min(best_ns, at_most_ns)
        if best_ns <= INLINE_BUDGET_NS:
            break
    return best_ns


def _execute(loaded: LoadedInstance, signature: ModelSignature, inputs: Sequence[Tensor]) -> int:
    return execute_probe(loaded.executor, probe_request(signature, inputs))

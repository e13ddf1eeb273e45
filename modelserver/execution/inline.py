"""Whether a model is executed on the event loop itself: by its config, and by measurement.

There a lone request crosses no thread, but the whole server waits for it. So this is only for models whose backend
declares it, or whose config asks for it, and under a budget, which `InlineGuard` watches.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Sequence

from modelserver.backend import Backend, DeviceKind
from modelserver.config.instance_rules import INLINE_EXECUTION, InlineExecution, inline_execution
from modelserver.config.signature import ModelSignature
from modelserver.core.tensor import Tensor
from modelserver.errors import ConfigError, ServerError
from modelserver.execution.instances import LoadedInstance
from modelserver.execution.warmup import execute_probe, probe_inputs, probe_request

# How long an execution may keep the event loop; docs/configuration.md promises it.
INLINE_BUDGET_NS = 200_000

# An execution over the budget adds its length in budgets to a score, up to this weight; one within it takes one off.
# So four slow ones in a row are too many, but occasional ones on a busy machine are not.
_MAX_WEIGHT = 4
_TOO_SLOW = 16
# No busy machine alone delays an execution by this much.
_HOPELESS_NS = 100_000_000


# CPU time in ns that a thread has used, and the number of its voluntary and involuntary waits.
ThreadUse = tuple[int, int, int]


def thread_use() -> ThreadUse:
    """The use of the calling thread so far; waits are 0 if the system does not count them."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return time.thread_time_ns(), 0, 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return time.thread_time_ns(), usage.ru_nvcsw, usage.ru_nivcsw


class InlineGuard:
    """Watches executions on the event loop, and reports when they have become slow. Event loop thread only.

    After a slow execution it measures the next ones more closely: one that only waited for a processor, and neither
    computed for long nor waited for anything else, does not count.
    """

    __slots__ = ("_before", "_on_slow", "_score", "_thread_use", "is_worried")

    def __init__(self, on_slow: Callable[[], None], thread_use: Callable[[], ThreadUse] = thread_use) -> None:
        self._on_slow = on_slow
        self._thread_use = thread_use
        self._score = 0
        self._before: ThreadUse | None = None
        # Whether callers must call `begin`, and also note executions within the budget.
        self.is_worried = False

    def begin(self) -> None:
        """An execution begins."""
        self._before = self._thread_use()

    def note(self, duration_ns: int) -> None:
        """An execution took this long. Calls `on_slow` each time that the score is too high."""
        before, self._before = self._before, None
        if duration_ns <= INLINE_BUDGET_NS:
            self._set_score(max(0, self._score - 1))
            return
        if before is not None and self._was_kept_waiting(before):
            return
        is_hopeless = duration_ns >= _HOPELESS_NS
        weight = _TOO_SLOW // 2 if is_hopeless else min(_MAX_WEIGHT, duration_ns // INLINE_BUDGET_NS)
        self._set_score(self._score + weight)
        if self._score >= _TOO_SLOW:
            self._set_score(0)
            self._on_slow()

    def _set_score(self, score: int) -> None:
        self._score = score
        self.is_worried = score > 0

    def _was_kept_waiting(self, before: ThreadUse) -> bool:
        cpu_ns, num_waits, num_forced = (now - then for now, then in zip(self._thread_use(), before, strict=True))
        return num_forced > 0 and num_waits == 0 and cpu_ns <= INLINE_BUDGET_NS


logger = logging.getLogger(__name__)

_NUM_UNTIMED = 3
_NUM_TIMED = 40
# A measurement over the budget is repeated: another process may have used the core meanwhile.
_NUM_ATTEMPTS = 3
# An execution this many times over the budget ends the measurement at once.
_HOPELESS = 25


def decide_inline(backend: Backend, instances: Sequence[LoadedInstance], signature: ModelSignature) -> bool:
    """Whether to execute the instances on the event loop. Blocking if that has to be measured.

    Raises ConfigError if the config demands it and the backend does not support it.
    """
    context = backend.context
    if context.config.sequence_batching is not None:
        return False  # an instance could not leave the loop while it holds a sequence
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
